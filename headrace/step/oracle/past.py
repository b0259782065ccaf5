"""Sequences of any length whose past is noise: no model has to run over it."""

from __future__ import annotations

import math

import torch

from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS
from headrace.step.division import chunks_of
from headrace.step.oracle.world import World


class NoisyPast(World):
    """A world whose caches hold noise in the place of keys and values.

    Over many tokens noise averages out, and no single token would be missed. So values grow with the root of
    how many tokens are seen, and at `edges`, as well as just before a window, there are some that are as much
    as all others together would be: one that is left out, or seen by mistake, changes the sum by a third.
    """

    def fill(self, tokens: list[int], tables: dict[KVGroup, list[int]]) -> None:
        position = len(tokens)
        generator = torch.Generator().manual_seed(position)
        for layer, described in enumerate(self.config.layers):
            table = torch.tensor(tables[described.group])
            window = described.window or 0
            first = max(0, position - window + 1) if window else 0
            scale = math.sqrt(position - first + 1)
            whole = table[first // BLOCK_TOKENS : position // BLOCK_TOKENS + 1]
            shape = (len(whole) * BLOCK_TOKENS, self.config.num_kv_heads, self.config.head_dim)
            k, v = (torch.randn(shape, generator=generator) for _ in range(2))
            self.cache.write_blocks(layer, whole, k.to(self.dtype), (scale / 2 * v).to(self.dtype))
            marked = torch.tensor([*edges(position, window), *([first - 1] if first else [])])
            k, v = (torch.randn(len(marked), *shape[1:], generator=generator) for _ in range(2))
            blocks, offsets = table[marked // BLOCK_TOKENS], marked % BLOCK_TOKENS
            self.cache.write(layer, blocks, offsets, k.to(self.dtype), (scale * scale / 4 * v).to(self.dtype))


def edges(position: int, window: int) -> list[int]:
    """Where errors of attention begin, for a row at `position`; window 0 sees everything.

    The first and the last token that it sees of the past, and both sides of the beginnings of some chunks.
    """
    chunks = chunks_of(position, window)
    first = max(0, position - window + 1) if window else 0
    some = {0, 1 % chunks.count, chunks.count // 2, chunks.count - 1}
    begins = [chunks.blocks(chunk).start * BLOCK_TOKENS for chunk in some]
    places = {first, position - 1, *begins, *(begin - 1 for begin in begins)}
    return sorted(place for place in places if first <= place < position)
