"""The cached passes: however a sequence is cut up and whoever shares the batch, the logits are the same."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.model import paging
from headrace.model.batch import Span
from headrace.model.config import DenseMLP, KVGroup, ModelConfig, MoEMLP
from headrace.model.kv import NO_BLOCK, KVCache
from headrace.model.presets import NORTH_MICRO_SHAPE, PRESETS, north_layers
from headrace.model.synthetic import synthetic_model
from headrace.model.transformer import Model
from tests.model.reference import Paged, assert_ragged_batches, assert_same_logits

WINDOW = 70
LENGTH = 230  # more than three blocks, and more than three windows


def small_north() -> ModelConfig:
    big = NORTH_MICRO_SHAPE
    routed = MoEMLP(width=16, experts=8, top_k=2)
    layers = north_layers(5, window=WINDOW, dense=DenseMLP(width=64), routed=routed)
    return replace(
        big, vocab_size=150, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, layers=layers
    )


@pytest.fixture(scope="module")
def model() -> Model:
    return synthetic_model(small_north(), seed=3)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    draw = random.Random(5)
    return [draw.randrange(150) for _ in range(LENGTH)]


@settings(max_examples=12)
@given(borders=st.sets(st.integers(1, LENGTH - 1), max_size=12))
def test_any_chunking_equals_one_pass(model: Model, tokens: list[int], borders: set[int]) -> None:
    expected = model.full(torch.tensor([tokens]))[0]
    cuts = [0, *sorted(borders), LENGTH]
    parts = [end - start for start, end in pairwise(cuts)]
    assert_same_logits(Paged(model).sequence(tokens, parts), expected)


@pytest.mark.parametrize("family", ["north", "llama"])
def test_filling_writes_what_a_whole_pass_writes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer; of the last one no more than its K and V are computed, with the layer before."""
    llama = replace(PRESETS["smollm2-135m"], vocab_size=150)
    made = synthetic_model(
        small_north() if family == "north" else replace(llama, layers=llama.layers[:3]), seed=3
    )
    tables = {group: [3, 1, 4, 2] for group in KVGroup}
    spans = [Span(list(range(100)), 0, tables), Span(list(range(50, 100)), 100, tables)]
    whole, filled = (KVCache(made.config, dict.fromkeys(KVGroup, 5), dtype=torch.float32) for _ in range(2))
    for span in spans:
        made([span], whole)
    last = made.blocks[-1]
    for name in ("mlp", "attention.q", "attention.o"):
        monkeypatch.setattr(last.get_submodule(name), "forward", None)
    for span in spans:
        assert len(list(made.fill([span], filled))) == made.config.num_layers - 1
    for ours, right in zip(filled.pages, whole.pages, strict=True):
        assert torch.equal(ours, right)
        assert right.any()


def test_decoding_equals_recomputation(model: Model, tokens: list[int]) -> None:
    expected = model.full(torch.tensor([tokens]))[0]
    assert_same_logits(Paged(model).sequence(tokens, [1] * LENGTH), expected)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_ragged_batches_equal_single_sequences(model: Model, tokens: list[int], seed: int) -> None:
    assert_ragged_batches(model, tokens, seed, [1, 1, 30, 64, 100])


def test_spans_of_one_pass_may_continue_each_other(model: Model, tokens: list[int]) -> None:
    expected = model.full(torch.tensor([tokens]))[0]
    blocks = {group: [3, 0, 2, 1] for group in KVGroup}
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 4), dtype=torch.float32)
    spans = [Span(tokens[a:b], a, blocks) for a, b in ((0, 100), (100, 101), (101, 102), (102, LENGTH))]
    assert_same_logits(model.logits(model(spans, cache)), expected)


def test_batches_of_single_tokens_are_split_when_they_get_large(
    model: Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of 4 blocks: sequences of 1, 2 and 4 blocks need two gathers."""
    monkeypatch.setattr(paging, "GATHER_BLOCKS", 4)
    lengths = [200, 10, 70]
    paged = Paged(model)
    for index, length in enumerate(lengths):
        paged.run((index, tokens[:length]))
    parts = [(index, tokens[length : length + 1]) for index, length in enumerate(lengths)]
    sizes: list[int] = []
    whole = paging.attend_singles

    def counted(q: Tensor, pages: Tensor, singles: paging.Singles) -> Tensor:
        sizes.append(len(q))
        return whole(q, pages, singles)

    monkeypatch.setattr(paging, "attend_singles", counted)
    expected = model.full(torch.tensor([tokens]))[0]
    for logits, length in zip(paged.run(*parts), lengths, strict=True):
        assert_same_logits(logits[0], expected[length])
    full_layers = len(model.config.layers_in(KVGroup.FULL))
    assert sizes.count(2) >= full_layers
    assert sizes.count(1) >= full_layers


@pytest.mark.parametrize(
    ("table", "start", "count"),
    [
        ([0, 1], 100, 40),  # too short
        ([NO_BLOCK, 1, 2], 130, 1),  # a window that begins in block 0
        ([0, NO_BLOCK, 2], 130, 10),
    ],
)
def test_a_missing_block_is_an_error(model: Model, table: list[int], start: int, count: int) -> None:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 4), dtype=torch.float32)
    tables = {KVGroup.FULL: [0, 1, 2], KVGroup.SLIDING: table}
    with pytest.raises(ValueError, match=r"need blocks .* given back"):
        model([Span([1] * count, start, tables)], cache)


def test_a_given_back_block_is_not_missed(model: Model) -> None:
    """At position 64 + WINDOW - 1 the window has just left block 0."""
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 4), dtype=torch.float32)
    start = 64 + WINDOW - 1
    tables: dict[KVGroup, list[int]] = {KVGroup.FULL: [0, 1, 2], KVGroup.SLIDING: [NO_BLOCK, 1, 2]}
    assert model([Span([1], start, tables)], cache).isfinite().all()
    with pytest.raises(ValueError, match="given back"):
        model([Span([1], start - 1, tables)], cache)


def test_half_precision_stays_close(tokens: list[int]) -> None:
    """bfloat16 keeps 8 bits: the cached path and the plain one agree to a few percent of the logits' size."""
    half = synthetic_model(small_north(), seed=3, dtype=torch.bfloat16)
    expected: Any = half.full(torch.tensor([tokens]))[0]
    got = Paged(half).sequence(tokens, [100, 1, 1, 128])
    assert got.dtype == torch.float32
    assert (got - expected).square().mean().sqrt() < 0.05 * expected.std()
