"""Dividing work that depends on a step's data: each item once, evenly, and chunks by the row alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.kv import BLOCK_TOKENS
from headrace.step.division import active_experts, attention_items, chunks_of, share_of
from headrace.step.isa import CHUNK_BLOCKS, MAX_CHUNKS

positions = st.integers(0, 300_000)
windows = st.sampled_from([0, 1, 63, 64, 65, 128, 4096])


@given(total=st.integers(0, 10_000), shares=st.integers(1, 200))
def test_shares_have_every_item_once(total: int, shares: int) -> None:
    items = [item for share in range(shares) for item in share_of(total, share, shares)]
    assert items == list(range(total))


@given(position=positions, window=windows)
def test_chunks_cover_what_a_row_sees(position: int, window: int) -> None:
    chunks = chunks_of(position, window)
    blocks = [block for chunk in range(chunks.count) for block in chunks.blocks(chunk)]
    oldest = max(0, position - window + 1) if window else 0
    assert blocks == list(range(oldest // BLOCK_TOKENS, position // BLOCK_TOKENS + 1))
    assert all(chunks.blocks(chunk) for chunk in range(chunks.count))
    assert 1 <= chunks.count <= MAX_CHUNKS


@pytest.mark.parametrize(
    ("position", "window", "size", "count"),
    [
        (0, 0, 2, 1),
        (127, 0, 2, 1),
        (128, 0, 2, 2),
        (8191, 0, 2, 64),  # 8K: chunks of 128 tokens
        (8192, 0, 3, 43),
        (131_071, 0, 32, 64),
        (8191, 4096, 2, 32),  # the window begins at a block
        (8192, 4096, 2, 33),  # and in the middle of one
    ],
)
def test_chunk_sizes(position: int, window: int, size: int, count: int) -> None:
    chunks = chunks_of(position, window)
    assert (chunks.size, chunks.count) == (size, count)


@given(
    rows=st.lists(st.none() | st.integers(0, 20_000), min_size=1, max_size=16),
    kv_heads=st.integers(1, 4),
    window=windows,
    shares=st.integers(1, 140),
)
def test_attention_is_divided_completely_and_evenly(
    rows: list[int | None], kv_heads: int, window: int, shares: int
) -> None:
    divided = [attention_items(rows, kv_heads, window, share, shares) for share in range(shares)]
    chunks = {row: chunks_of(at, window) for row, at in enumerate(rows) if at is not None}
    expected = [
        (row, head, chunk)
        for row, of in chunks.items()
        for head in range(kv_heads)
        for chunk in range(of.count)
    ]
    assert [(item.row, item.kv_head, item.chunk) for items in divided for item in items] == expected
    if chunks:
        total = kv_heads * sum(of.count * of.size for of in chunks.values())
        longest = max(of.size for of in chunks.values())
        for items in divided:
            blocks = sum(chunks[item.row].size for item in items)
            assert blocks <= total // shares + 1 + longest


def test_at_8k_every_sm_of_an_h200_has_one_chunk_of_a_window_or_two_of_everything() -> None:
    for window, most in ((4096, 1), (0, 2)):
        counts = [len(attention_items([8191], 4, window, share, 132)) for share in range(132)]
        assert max(counts) == most
        assert chunks_of(8191, window).size == CHUNK_BLOCKS


def test_experts_are_numbered_in_index_order() -> None:
    assert active_experts([[7, 3], [3, 12], []]) == [3, 7, 12]
