"""The paged KV cache: where the keys and values of past tokens lie.

A block holds BLOCK_TOKENS consecutive positions of one sequence for all layers of a group. Within a layer it
is, for each KV head, one contiguous page of K and one of V: at 64 tokens, a head size of 128 and two bytes an
element a page is 16 KB, the unit in which the decode kernel fetches memory.

Who owns what: the engine's block pool decides which sequence owns which block id; this module only stores.
Block tables are plain lists of block ids, indexed by position // BLOCK_TOKENS. A block that a sliding layer
has given back leaves NO_BLOCK in its place, so that an index never shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.model.config import KVGroup, ModelConfig

BLOCK_TOKENS = 64
NO_BLOCK = -1


class KVCache:
    """K and V pages of every layer.

    `pages[layer]` has shape [blocks of the layer's group, KV heads, 2 (K, V), BLOCK_TOKENS, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Mapping[KVGroup, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blocks = dict(blocks)
        self.pages = [
            torch.zeros(
                (self.blocks[layer.group], config.num_kv_heads, 2, BLOCK_TOKENS, config.head_dim),
                dtype=dtype,
                device=device,
            )
            for layer in config.layers
        ]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [tokens, KV heads, head_dim], at `offsets` [tokens] within `blocks` [tokens]."""
        self.pages[layer][blocks, :, 0, offsets] = k
        self.pages[layer][blocks, :, 1, offsets] = v

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in `blocks` (any shape [..., n]), each [..., n * BLOCK_TOKENS, KV heads, head_dim]."""
        pages = self.pages[layer][blocks]  # [..., n, heads, 2, tokens, dim]
        pages = pages.movedim(-4, -2)  # [..., n, 2, tokens, heads, dim]
        k, v = pages[..., 0, :, :, :], pages[..., 1, :, :, :]
        return k.flatten(-4, -3), v.flatten(-4, -3)


def block_bytes(config: ModelConfig, group: KVGroup, element_size: int) -> int:
    """Bytes that one block of `group` takes, over all layers of the group."""
    tokens = 2 * BLOCK_TOKENS * config.num_kv_heads * config.head_dim
    return len(config.layers_in(group)) * tokens * element_size


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


def first_visible_block(position: int, window: int | None) -> int:
    """The index of the first block that a query at `position` can see; blocks before it may be given back."""
    if window is None:
        return 0
    return max(0, position - window + 1) // BLOCK_TOKENS


BlockTables = Mapping[KVGroup, Sequence[int]]
