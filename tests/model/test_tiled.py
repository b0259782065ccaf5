"""Long chunks cut into tiles, as on a Hopper GPU, with cuDNN's place taken by its plain twin."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernel.prompt.passes import _MOST_PARTS
from headrace.model import paging, tiled, varlen
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.presets import PRESETS
from headrace.model.transformer import Model
from tests.model.reference import Paged, assert_ragged_batches, assert_same_logits
from tests.model.test_paging import LENGTH, WINDOW, model, tokens

__all__ = ["model", "tokens"]  # fixtures
CPU = torch.device("cpu")
CUTS = [
    [LENGTH],
    [100, 130],
    [70, 70, 90],
    [64, 64, 102],
    [33, 1, 2, 194],
    [40, 75, 115],
    [1, 229],
    [WINDOW, 1, WINDOW - 1, 90],
]


@pytest.fixture(params=[10, 35], autouse=True)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    assert WINDOW % request.param == 0
    monkeypatch.setattr(paging, "has_flash", lambda *_: True)
    monkeypatch.setattr(paging, "tile_for", lambda *_: request.param)
    return int(request.param)


@pytest.mark.parametrize("parts", CUTS)
def test_any_chunking_equals_one_pass(model: Model, tokens: list[int], parts: list[int]) -> None:
    expected = model.full(torch.tensor([tokens]))[0]
    assert_same_logits(Paged(model).sequence(tokens, parts), expected)


@pytest.mark.parametrize("seed", range(6))
def test_ragged_batches_equal_single_sequences(model: Model, tokens: list[int], seed: int) -> None:
    assert_ragged_batches(model, tokens, seed, [1, 15, 64, 100, 140])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("start", "count"), [(0, 120), (7, 90), (30, 60), (64, 100), (200, 170)])
def test_tiles_equal_what_is_meant(
    window: int | None, start: int, count: int, dtype: torch.dtype, tile: int
) -> None:
    """The same chunk with and without tiles: parts are rounded to bfloat16, and so is their mean."""
    torch.manual_seed(1)
    pages = torch.randn(9, 2, 2, 64 * 16).to(dtype)
    span = Span([0] * count, start, {group: list(range(9)) for group in KVGroup})
    q = torch.randn(count, 4, 16).to(dtype)
    k, v = (torch.randn(count, 2, 16).to(dtype) for _ in "kv")
    planned = [varlen.plan_varlen([span], KVGroup.SLIDING, window, CPU, size) for size in (None, 10)]
    assert not planned[0].blocks
    assert planned[1].blocks
    plain, tiles = (varlen.attend_varlen(q, k, v, pages, plan) for plan in planned)
    error = (plain - tiles).float().abs()
    if dtype == torch.float32:
        assert error.max() < 1e-5
    else:
        assert (error <= plain.float().abs() * 2**-7 + 2**-8 * plain.float().abs().mean() * 4).all()


@pytest.mark.parametrize("wrong", ["edge", "rectangle", "join", "rows"])
def test_a_wrong_part_is_seen(
    model: Model, tokens: list[int], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, join = tiled.plan_blocks, tiled.join

    def spoilt(*given: Any, **named: Any) -> list[tiled.Block]:
        return [replace(block, parts=tuple(map(part, block.parts))) for block in plan(*given, **named)]

    def part(made: tiled.Part) -> tiled.Part:
        begin, end = made.keys.start, made.keys.stop
        if wrong == "edge" and made.turned is not None:
            return replace(made, keys=slice(begin - 1, end - 1))
        if wrong == "rows" and made.turned is not None:
            return replace(made, turned=made.turned.flip(0))
        if wrong == "rectangle" and not made.causal:
            return replace(made, keys=slice(begin, end - 1))
        return made

    def unweighed(values: list[Tensor], sums: list[Tensor], *rest: Any) -> None:
        join(values, [torch.zeros_like(part) for part in sums], *rest)

    monkeypatch.setattr(tiled, "plan_blocks", spoilt)
    if wrong == "join":
        monkeypatch.setattr(tiled, "join", unweighed)
    expected = model.full(torch.tensor([tokens]))[0]
    with pytest.raises(AssertionError):
        assert_same_logits(Paged(model, blocks=40).sequence(tokens, [100, 130]), expected)


def test_a_pair_taken_for_one_square_is_seen(
    model: Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, counts = tiled.plain, []

    def as_one(*given: Tensor, count: int = 1, **named: Any) -> tuple[Tensor, Tensor | None]:
        counts.append(count)
        out, sums = attend(*given, **named)
        return out, None if sums is None else sums.view(-1, count, sums.shape[-1] // count).transpose(0, 1)

    monkeypatch.setattr(paging, "tile_for", lambda *_: 35)
    monkeypatch.setattr(tiled, "plain", as_one)
    expected = model.full(torch.tensor([tokens]))[0]
    with pytest.raises(AssertionError):
        assert_same_logits(Paged(model).sequence(tokens, [LENGTH]), expected)
    assert max(counts) == 2


def test_squares_of_a_window_are_taken_in_pairs() -> None:
    """A long prompt's, and of two prompts in one pass; none where one sees the whole past."""

    def sizes(*ends: int, window: int | None = 4096) -> list[list[int]]:
        blocks, row = [], 0
        for end in ends:
            blocks += tiled.plan_blocks(0, end, window, 1024, row=row, key=row, device=CPU)
            row += end
        return [[block.parts[0].queries for block in group] for group in tiled.pairs(blocks, window)]

    assert sizes(8192) == [[4096, 4096]]
    assert sizes(13312) == [[4096, 4096], [4096], [1024]]
    assert sizes(4096, 5120, 4096) == [[4096, 4096], [1024], [4096]]
    assert sizes(2048, 2048) == [[2048], [2048]]
    assert sizes(8192, window=None) == [[8192]]
    apart = [
        replace(block, rows=slice(block.rows.start + 1, block.rows.stop + 1))
        for block in tiled.plan_blocks(4096, 8192, 4096, 1024, row=0, key=0, device=CPU)
    ]
    first = tiled.plan_blocks(0, 4096, 4096, 1024, row=0, key=0, device=CPU)
    assert [len(group) for group in tiled.pairs([*first, *apart], 4096)] == [1, 1]


def test_shapes_are_few() -> None:
    """However long chunks are, and wherever they begin in a context of 128K.

    cuDNN makes a plan for each: lengths of queries and keys, whether causal, whether sums go along.
    """
    window = PRESETS["north-mini-code"].window
    shapes = set()
    for start in range(0, 2**17 - 9216, 64 * 37):
        for size, length in itertools.product((None, window), range(2048, 9216, 704)):
            first, last = tiled.whole_tiles(start, start + length, size, 1024) or (0, 0)
            blocks = tiled.plan_blocks(first, last, size, 1024, row=0, key=0, device=CPU)
            assert sum(part.queries for block in blocks for part in block.parts[:1]) == last - first
            shapes |= {
                (part.queries, part.keys.stop - part.keys.start, part.causal, len(block.parts) > 1)
                for block in blocks
                for part in block.parts
            }
    assert len(shapes) <= 30


def test_what_is_too_short_or_has_another_window_is_left_alone() -> None:
    assert tiled.whole_tiles(5, 2053, None, 1024) is None
    assert tiled.whole_tiles(5, 3073, None, 1024) == (1024, 3072)
    assert tiled.whole_tiles(0, 8192, 4095, 1024) is None
    assert tiled.whole_tiles(0, 8192, None, None) is None


def test_other_devices_have_no_tiles() -> None:
    assert tiled.tile_for(CPU, torch.bfloat16, 128) is None


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "count"),
    [(1024, 1024, True, 1), (1023, 1023, True, 1), (2048, 4096, False, 1), (1024, 1024, True, 2)],
)
def test_cudnn_does_what_is_meant(queries: int, keys: int, causal: bool, count: int, joined: bool) -> None:
    assert tiled.tile_for(torch.device("cuda"), torch.bfloat16, 128) == tiled.TILE
    torch.manual_seed(2)
    q = torch.randn(count * queries, 8, 128, device="cuda").bfloat16()
    k, v = (torch.randn(count * keys + 1, 2, 128, device="cuda").bfloat16()[1:] for _ in "kv")
    out, sums = tiled.cudnn(q, k, v, causal=causal, joined=joined, count=count)
    right, right_sums = tiled.plain(q, k, v, causal=causal, joined=joined, count=count)
    assert out.is_contiguous()
    assert (out - right).float().abs().max() < 0.07  # two steps of the largest numbers
    assert (sums is None) != joined
    if sums is not None and right_sums is not None:
        assert sums.shape == right_sums.shape
        assert (sums - right_sums).abs().max() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 8192), (100, 5000), (8192, 8192), (12000, 3000), (0, 16384)]
)
def test_tiles_and_flash_agree_on_a_gpu(window: int | None, start: int, count: int) -> None:
    torch.manual_seed(3)
    cuda = torch.device("cuda")
    pages = torch.randn(260, 4, 2, 64 * 128, device=cuda).bfloat16()
    span = Span([0] * count, start, {group: list(range(260)) for group in KVGroup})
    q = torch.randn(count, 32, 128, device=cuda).bfloat16()
    k, v = (torch.randn(count, 4, 128, device=cuda).bfloat16() for _ in "kv")
    planned = [varlen.plan_varlen([span], KVGroup.FULL, window, cuda, size) for size in (None, tiled.TILE)]
    assert planned[1].blocks
    by_flash, by_tiles = (varlen.attend_varlen(q, k, v, pages, plan).float() for plan in planned)
    assert (by_flash - by_tiles).square().mean().sqrt() < 0.01 * by_flash.square().mean().sqrt()
    assert (by_flash - by_tiles).abs().amax(dim=(1, 2)).max() < 0.1


@pytest.mark.parametrize("window", [None, 1024, 4096, 16384])
@pytest.mark.parametrize("chunk", [3072, 5000, 8192, 16384])
def test_all_shapes_are_foreseen(window: int | None, chunk: int) -> None:
    """And none that cannot come: each takes its time to be planned."""
    context, met = 200_000, set()
    for start in range(0, context // 1024):
        for tiles in range(2, chunk // 1024 + 1):
            end = (start + tiles) * 1024
            if end <= context:
                blocks = tiled.plan_blocks(start * 1024, end, window, 1024, row=0, key=0, device=CPU)
                met |= {shape for group in tiled.pairs(blocks, window) for shape in shapes_of(group)}
    if window is not None and 2 * window <= chunk:  # two prompts that begin
        each = (tiled.plan_blocks(0, window, window, 1024, row=at, key=at, device=CPU) for at in (0, window))
        [pair] = tiled.pairs([block for blocks in each for block in blocks], window)
        met |= shapes_of(pair)
    assert met <= set(tiled.shapes(chunk, context, window, 1024))
    assert len(tiled.shapes(chunk, context, window, 1024)) < 1.5 * len(met)


def shapes_of(group: list[tiled.Block]) -> set[tiled.Shape]:
    own, joined = group[0].parts[0].queries, any(len(block.parts) > 1 for block in group)
    return {tiled.Shape(own, own, True, joined, len(group))} | {
        tiled.Shape(part.queries, part.keys.stop - part.keys.start, part.causal, joined)
        for block in group
        for part in block.parts[1:]
    }


@pytest.mark.parametrize("tiles", [100, 191, 255, 256, 487, 511, 1023])
def test_a_block_has_no_more_parts_than_can_be_joined(tiles: int) -> None:
    """The kernel that joins them takes 16: more would have ended the engine."""
    [block] = tiled.plan_blocks(tiles * 1024, (tiles + 1) * 1024, None, 1024, row=0, key=0, device=CPU)
    assert len(block.parts) <= _MOST_PARTS
    seen = sorted((part.keys.start, part.keys.stop) for part in block.parts)
    assert [begin for begin, _ in seen] == [0, *(end for _, end in seen[:-1])]
    assert seen[-1][1] == (tiles + 1) * 1024


def test_where_there_are_no_tiles_nothing_is_planned() -> None:
    assert tiled.shapes(2047, 200_000, None, 1024) == []
    assert tiled.shapes(8192, 200_000, 1000, 1024) == []
