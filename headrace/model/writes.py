"""Where the tokens of a pass are written: whole blocks at once, the tokens before and after them singly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.kv import BLOCK_TOKENS, KVCache


@dataclass(frozen=True, slots=True)
class Writes:
    """`whole` are the tokens of the pass that fill `blocks`, BLOCK_TOKENS each, in order.

    The tokens `rest` go to `rest_blocks` at `rest_offsets`, one by one. All are int64.
    """

    whole: Tensor
    blocks: Tensor
    rest: Tensor
    rest_blocks: Tensor
    rest_offsets: Tensor

    def to(self, device: torch.device) -> Writes:
        """The same there, by one copy: each is a wait."""
        parts = (self.whole, self.blocks, self.rest, self.rest_blocks, self.rest_offsets)
        return Writes(*torch.split(torch.cat(parts).to(device), [len(part) for part in parts]))

    def write(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v, [tokens of the pass, KV heads, head_dim]."""
        if len(self.blocks):
            # Most prompts' tokens are all of one kind, and then nothing is picked out.
            every = len(self.whole) == len(k)
            cache.write_blocks(
                layer, self.blocks, k if every else k[self.whole], v if every else v[self.whole]
            )
        if len(self.rest):
            cache.write(layer, self.rest_blocks, self.rest_offsets, k[self.rest], v[self.rest])


def plan_writes(spans: Sequence[tuple[int, int, int, Sequence[int]]]) -> Writes:
    """The writes of spans laid end to end: of each its first position, the one after its last, and its table.

    A table is an index, and the block ids from that index on.
    """
    whole: list[Tensor] = []
    blocks: list[int] = []
    rest, rest_blocks, rest_offsets = [], [], []
    row = 0
    for start, end, first, table in spans:
        begin = min(-(-start // BLOCK_TOKENS) * BLOCK_TOKENS, end)
        stop = max(end // BLOCK_TOKENS * BLOCK_TOKENS, begin)
        whole.append(torch.arange(begin, stop) + (row - start))
        blocks += table[begin // BLOCK_TOKENS - first : stop // BLOCK_TOKENS - first] if begin < stop else []
        positions = torch.cat([torch.arange(start, begin), torch.arange(stop, end)])
        rest.append(positions + (row - start))
        indices = (positions // BLOCK_TOKENS - first).tolist()  # few, where the table may be long
        rest_blocks.append(torch.tensor([table[index] for index in indices], dtype=torch.int64))
        rest_offsets.append(positions % BLOCK_TOKENS)
        row += end - start
    return Writes(
        torch.cat(whole),
        torch.tensor(blocks, dtype=torch.int64),
        torch.cat(rest),
        torch.cat(rest_blocks),
        torch.cat(rest_offsets),
    )
