"""The paged KV cache: where the keys and values of past tokens lie.

A block holds BLOCK_TOKENS consecutive positions of one sequence for all layers of a group. Within a layer it
is, for each KV head, one contiguous page of K and one of V: at 64 tokens, a head size of 128 and two bytes an
element a page is 16 KB, the unit in which the decode kernel fetches memory.

Within a page elements lie as the kernel's tensor core instructions (mma.sync.m16n8k16) take them: a tile is
8 rows (n) by 32 columns (k), row after row, and lane 4n + c takes the 16 bytes of columns 8c .. 8c + 7. The
hardware numbers k otherwise, but a sum does not mind if both factors agree. Pages are, outermost first:

    K   token // 32, j, dim // 32, c, e, dim % 32      with token % 32 = 8c + 2j + e: row n = 2c + e of tile j
    V   dim // 8, token // 32, dim % 8, token % 32     rows are dimensions, columns tokens

K's tokens are shuffled so that the scores of tile j, of which a lane gets columns 2c and 2c + 1, belong to
the columns 8c + 2j and 8c + 2j + 1 of V that the same lane takes. Where 32 (K) or 8 (V) does not divide the
head size, the greatest common divisor takes its place.

Who owns what: the engine's block pool decides which sequence owns which block id; this module only stores.
Block tables are plain lists of block ids, indexed by position // BLOCK_TOKENS. A block that a sliding layer
has given back leaves NO_BLOCK in its place, so that an index never shifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.model.config import KVGroup, ModelConfig
from headrace.model.fused import Fused

BLOCK_TOKENS = 64
NO_BLOCK = -1

_COLUMNS = 32  # of a tile


class KVCache:
    """K and V pages of every layer.

    `pages[layer]` has shape [blocks of the layer's group, KV heads, 2 (K, V), BLOCK_TOKENS * head_dim].
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
        self.fused: Fused | None = None
        self.pages = [
            zeros(
                (self.blocks[layer.group], config.num_kv_heads, 2, BLOCK_TOKENS * config.head_dim),
                dtype,
                torch.device(device),
            )
            for layer in config.layers
        ]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [tokens, KV heads, head_dim], at `offsets` [tokens] within `blocks` [tokens]."""
        half, within = offsets // _COLUMNS, offsets % _COLUMNS
        c, j, e = within // 8, within // 2 % 4, within % 2
        keys, values = _keys(self.pages[layer][:, :, 0]), _values(self.pages[layer][:, :, 1])
        keys[blocks, :, half, c, j, e] = k.reshape(*k.shape[:2], *keys.shape[-2:])
        values[blocks, :, half, within] = v.reshape(*v.shape[:2], *values.shape[-2:])

    def write_blocks(self, layer: int, blocks: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill `blocks` [n] with k and v, [n * BLOCK_TOKENS, KV heads, head_dim]: as `write`, in one copy."""
        pages = self.pages[layer]
        if self.fused is not None:
            self.fused.write_blocks(pages, blocks, k.contiguous(), v.contiguous())
            return
        filled = pages.new_empty(len(blocks), *pages.shape[1:])
        keys, values = _keys(filled[:, :, 0]), _values(filled[:, :, 1])
        k = k.view(len(blocks), *keys.shape[2:6], *k.shape[1:2], *keys.shape[6:])
        keys.copy_(k.movedim(5, 1))
        v = v.view(len(blocks), *values.shape[2:4], *v.shape[1:2], *values.shape[4:])
        values.copy_(v.movedim(3, 1))
        pages.index_copy_(0, blocks, filled)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in `blocks` [..., n], each [..., n * BLOCK_TOKENS, KV heads, head_dim]."""
        pages = self.pages[layer][blocks]  # [..., n, heads, 2, page]
        k, v = keys_of(pages[..., 0, :]), values_of(pages[..., 1, :])  # [..., n, heads, tokens, dim]
        return k.movedim(-3, -2).flatten(-4, -3), v.movedim(-3, -2).flatten(-4, -3)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take memory only once they are written.

    A pool is sized for the most that could be used; torch.zeros would touch all of it at the start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), dtype=np.uint8)).view(dtype).squeeze(-1)


def keys_of(pages: Tensor) -> Tensor:
    """The keys in K pages [..., BLOCK_TOKENS * head_dim]: [..., BLOCK_TOKENS, head_dim], a copy."""
    return _keys(pages).flatten(-6, -3).flatten(-2)


def values_of(pages: Tensor) -> Tensor:
    """The values in V pages [..., BLOCK_TOKENS * head_dim]: [..., BLOCK_TOKENS, head_dim], a copy."""
    return _values(pages).flatten(-4, -3).flatten(-2)


def _keys(pages: Tensor) -> Tensor:
    """A view of K pages by token and dimension: [..., token // 32, c, j, e, dim // 32, dim % 32]."""
    head_dim = pages.shape[-1] // BLOCK_TOKENS
    columns = math.gcd(head_dim, _COLUMNS)
    tiles = pages.view(*pages.shape[:-1], BLOCK_TOKENS // _COLUMNS, 4, head_dim // columns, 4, 2, columns)
    return tiles.permute(*range(pages.dim() - 1), -6, -3, -5, -2, -4, -1)


def _values(pages: Tensor) -> Tensor:
    """A view of V pages by token and dimension: [..., token // 32, token % 32, dim // 8, dim % 8]."""
    head_dim = pages.shape[-1] // BLOCK_TOKENS
    rows = math.gcd(head_dim, 8)
    tiles = pages.view(*pages.shape[:-1], head_dim // rows, BLOCK_TOKENS // _COLUMNS, rows, _COLUMNS)
    return tiles.permute(*range(pages.dim() - 1), -3, -1, -4, -2)


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
