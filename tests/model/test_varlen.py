"""Chunks that attend together, as on a GPU, with flash attention's place taken by its plain twin."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model import paging, varlen
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, KVCache, blocks_for, first_visible_block
from headrace.model.transformer import Model
from headrace.model.writes import plan_writes
from tests.model.reference import Paged, assert_ragged_batches, assert_same_logits
from tests.model.test_paging import LENGTH, WINDOW, model, small_north, tokens

__all__ = ["model", "tokens"]  # fixtures


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "has_flash", lambda device, dtype: True)


@pytest.mark.parametrize(
    "parts",
    [
        [LENGTH],
        [100, 130],
        [64, 64, 102],
        [63, 1, 2, 164],
        [WINDOW, 1, WINDOW - 1, 90],
        [30] * 7 + [20],
        [1, 229],
        [65, 1, 1, 163],
    ],
)
def test_any_chunking_equals_one_pass(model: Model, tokens: list[int], parts: list[int]) -> None:
    expected = model.full(torch.tensor([tokens]))[0]
    assert_same_logits(Paged(model).sequence(tokens, parts), expected)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_ragged_batches_equal_single_sequences(model: Model, tokens: list[int], seed: int) -> None:
    """Chunks of several sequences, and single tokens between them, share passes."""
    assert_ragged_batches(model, tokens, seed, [1, 30, 64, 100])


def test_spans_of_one_sequence_may_continue_one_another(model: Model, tokens: list[int]) -> None:
    expected = model.full(torch.tensor([tokens]))[0]
    paged = Paged(model)
    first, second, third = paged.run((0, tokens[:70]), (0, tokens[70:170]), (0, tokens[170:]))
    assert_same_logits(torch.cat([first, second, third]), expected)


@pytest.mark.parametrize("wrong", ["window", "past", "queries"])
def test_a_wrong_plan_is_seen(
    model: Model, tokens: list[int], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = varlen.plan_varlen

    def spoilt(*arguments: Any) -> varlen.Varlen:
        made = plan(*arguments)
        if wrong == "window" and made.window is not None:
            return replace(made, window=made.window - 1)
        if wrong == "past" and made.past is not None:
            return replace(made, past=replace(made.past, blocks=made.past.blocks.flip(0)))
        (run,) = made.runs
        if wrong == "queries" and len(run.queries) == 3:
            queries, keys = (0, run.queries[1] - 1, run.queries[2]), (0, run.keys[1] - 1, run.keys[2])
            return replace(made, runs=(varlen.run_of(queries, keys, torch.device("cpu")),))
        return made

    monkeypatch.setattr(paging, "plan_varlen", spoilt)
    expected = model.full(torch.tensor([tokens]))[0]
    paged = Paged(model, blocks=40)
    got = torch.cat([*paged.run((0, tokens[:130]), (1, tokens[:50]))[:1], *paged.run((0, tokens[130:]))])
    with pytest.raises(AssertionError):
        assert_same_logits(got, expected)


SIZES = (0, 1, 63, 64, 65, 127, 128, 200)


@pytest.mark.parametrize(("start", "end"), [(a, b) for a in SIZES for b in SIZES if a < b])
def test_blocks_are_filled_as_tokens_are_written(start: int, end: int) -> None:
    config = small_north()
    layer, blocks = 1, [5, 2, 7, 0]
    ours, theirs = (KVCache(config, dict.fromkeys(KVGroup, 8), dtype=torch.float32) for _ in "ab")
    shape = (2 * (end - start), config.num_kv_heads, config.head_dim)
    k, v = torch.randn(shape), torch.randn(shape)
    first = start // BLOCK_TOKENS
    table = blocks[first:]
    other = [3, 1, 4, 6][first:]
    plan_writes([(start, end, first, table), (start, end, first, other)]).write(ours, layer, k, v)
    positions = torch.arange(start, end)
    for ids, part in ((blocks, slice(None, end - start)), ([3, 1, 4, 6], slice(end - start, None))):
        theirs.write(
            layer, torch.tensor(ids)[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS, k[part], v[part]
        )
    assert torch.equal(ours.pages[layer], theirs.pages[layer])
    assert (ours.pages[layer] != 0).any()


CPU = torch.device("cpu")


def span_of(start: int, end: int, seed: int = 0) -> Span:
    """Tokens start .. end of a sequence whose blocks are scattered."""
    blocks = random.Random(seed).sample(range(10_000), blocks_for(end))
    return Span([0] * (end - start), start, dict.fromkeys(KVGroup, blocks))


@settings(max_examples=30)
@given(
    borders=st.lists(
        st.lists(st.integers(0, 1000), min_size=2, max_size=2, unique=True), min_size=1, max_size=3
    ),
    window=st.sampled_from([None, 64, 128, 300]),
)
def test_the_past_is_read_block_by_block(borders: list[list[int]], window: int | None) -> None:
    """The plan's arrays against a plain loop over blocks."""
    spans = [span_of(min(pair), max(pair), index) for index, pair in enumerate(borders)]
    made, expected, key = varlen.plan_varlen(spans, KVGroup.FULL, window, CPU), [], 0
    for span in spans:
        first = first_visible_block(span.start, window)
        for index in range(first, blocks_for(span.start)):
            begin = index * BLOCK_TOKENS
            row = key + begin - first * BLOCK_TOKENS
            expected.append((span.tables[KVGroup.FULL][index], row, min(BLOCK_TOKENS, span.start - begin)))
        key += span.end - first * BLOCK_TOKENS
    assert made.keys == key
    past = made.past
    columns = () if past is None else (past.blocks.tolist(), past.rows.tolist(), past.counts.tolist())
    assert list(zip(*columns, strict=True)) == expected
    if past is not None:
        assert all(column.is_contiguous() for column in (past.blocks, past.rows, past.counts))


@pytest.mark.parametrize("window", [None, 4096])
def test_a_long_past_has_no_loops_on_the_host(window: int | None) -> None:
    """The first layer of a pass waits for the plan: behind 131,000 tokens it takes no more calls than behind
    4,000."""
    assert calls_to_plan(131_000, window) < calls_to_plan(4_000, window) + 50


def calls_to_plan(start: int, window: int | None) -> int:
    """Functions that are called for the plan of a chunk of 500 tokens, Python's own and others."""
    span, calls = span_of(start, start + 500), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        paging.plan_group([span], KVGroup.FULL, window, CPU, flash=True, tile=1024)
    finally:
        sys.setprofile(None)
    return calls
