"""The order of elements within K and V pages, said once more element by element."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, KVCache
from headrace.model.presets import NORTH_MICRO_SHAPE


def make_cache(head_dim: int, kv_heads: int, blocks: int = 3) -> KVCache:
    config = replace(
        NORTH_MICRO_SHAPE,
        head_dim=head_dim,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        layers=NORTH_MICRO_SHAPE.layers[:1],
    )
    return KVCache(config, {KVGroup.FULL: blocks}, dtype=torch.float32)


def key_place(token: int, dim: int, head_dim: int) -> int:
    """Where a K page has an element: tiles of 8 keys by 32 dimensions, the keys of 32 dealt out to lanes."""
    columns = math.gcd(head_dim, 32)
    half, within = divmod(token, 32)
    lane, rest = divmod(within, 8)
    tile, e = divmod(rest, 2)
    block, column = divmod(dim, columns)
    row = lane * 2 + e
    tile_index = (half * 4 + tile) * (head_dim // columns) + block
    return tile_index * 8 * columns + row * columns + column


def value_place(token: int, dim: int, head_dim: int) -> int:
    """Where a V page has an element: tiles of 8 dimensions by 32 tokens."""
    rows = math.gcd(head_dim, 8)
    tile_index = (dim // rows) * 2 + token // 32
    return tile_index * rows * 32 + (dim % rows) * 32 + token % 32


@pytest.mark.parametrize("head_dim", [128, 64, 32, 16, 8, 6])
def test_pages_have_the_documented_order(head_dim: int) -> None:
    cache = make_cache(head_dim, kv_heads=2)
    k = torch.arange(BLOCK_TOKENS * 2 * head_dim, dtype=torch.float32).view(BLOCK_TOKENS, 2, head_dim)
    v = -1 - k
    cache.write(0, torch.full((BLOCK_TOKENS,), 1), torch.arange(BLOCK_TOKENS), k, v)
    pages = cache.pages[0]
    places = {
        (token, dim): (key_place(token, dim, head_dim), value_place(token, dim, head_dim))
        for token in range(BLOCK_TOKENS)
        for dim in range(head_dim)
    }
    assert sorted(place for place, _ in places.values()) == list(range(BLOCK_TOKENS * head_dim))
    assert sorted(place for _, place in places.values()) == list(range(BLOCK_TOKENS * head_dim))
    for (token, dim), (key, value) in places.items():
        assert pages[1, :, 0, key].tolist() == k[token, :, dim].tolist()
        assert pages[1, :, 1, value].tolist() == v[token, :, dim].tolist()
    assert not pages[[0, 2]].any()


@settings(max_examples=30)
@given(
    head_dim=st.sampled_from([2, 6, 8, 16, 24, 32, 48, 64, 80, 128]),
    kv_heads=st.integers(1, 3),
    places=st.sets(st.tuples(st.integers(0, 2), st.integers(0, BLOCK_TOKENS - 1)), min_size=1, max_size=40),
)
def test_what_is_written_is_read(head_dim: int, kv_heads: int, places: set[tuple[int, int]]) -> None:
    cache = make_cache(head_dim, kv_heads)
    blocks, offsets = torch.tensor(sorted(places)).T
    k, v = torch.randn(2, len(places), kv_heads, head_dim)
    cache.write(0, blocks, offsets, k, v)
    keys, values = cache.read(0, torch.arange(3))
    where = blocks * BLOCK_TOKENS + offsets
    assert torch.equal(keys[where], k)
    assert torch.equal(values[where], v)
    others = torch.ones(3 * BLOCK_TOKENS, dtype=torch.bool)
    others[where] = False
    assert not keys[others].any()
    assert not values[others].any()
