"""The bench's arithmetic and its demands, with a kernel that only pretends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from headrace.bench.decode import (
    BenchError,
    Measured,
    Method,
    Pool,
    bandwidth_of,
    bench_decode,
    check_room,
    measure,
    pool_blocks,
)
from headrace.bench.points import Point, parse_point
from headrace.bench.power import Power
from headrace.model.config import KVGroup
from headrace.model.kv import NO_BLOCK, blocks_for
from headrace.model.presets import PRESETS
from headrace.step.limit import step_bytes
from headrace.step.oracle.rows import LaunchRow

MICRO = PRESETS["north-micro-shape"]  # a window of 256 tokens; 8 layers with 16 experts, top 4
NORTH = PRESETS["north-mini-code"]
METHOD = Method(launches=4, warm_up=2, steps=8)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pretender:
    """A kernel whose launches take the given milliseconds, one number after the other."""

    def __init__(self, clock: Clock, milliseconds: Sequence[float], *, experts: int = 80) -> None:
        self.clock, self.left, self.experts_read = clock, list(milliseconds), experts
        self.seen: list[list[LaunchRow]] = []
        self.token: int | None = 7
        self.short = 0

    def launch(self, rows: Sequence[LaunchRow | None], steps: int) -> Iterator[list[int | None]]:
        self.seen.append([row for row in rows if row is not None])
        self.clock.now += self.left.pop(0) / 1e3
        for _ in range(steps - self.short):
            yield [self.token for _ in rows]


def measured(
    pretender: Pretender,
    point: str = "2x100",
    power: Callable[[float, float], Power | None] = lambda begin, end: None,
) -> Measured:
    parsed = parse_point(point)
    pool = Pool(MICRO, [parsed], METHOD, "cpu")
    return measure(
        MICRO,
        parsed,
        pool.tables(parsed),
        pretender,
        bandwidth=1e9,
        method=METHOD,
        clock=pretender.clock,
        power=power,
    )


def test_medians_leave_the_warm_up_out() -> None:
    result = measured(Pretender(Clock(), [900, 900, 8, 16, 16, 80]))
    assert result.milliseconds == pytest.approx((1, 2, 2, 10))
    assert result.median == pytest.approx(2)
    assert result.spread == pytest.approx(9)
    assert result.tokens_per_second == pytest.approx(1000)
    assert result.experts == 10


def test_power_is_that_of_the_timed_launches() -> None:
    asked: list[tuple[float, float]] = []
    power = Power(sm_clock_mhz=1790.0, watts=703.24, limited=True)

    def watched(begin: float, end: float) -> Power:
        asked.append((begin, end))
        return power

    result = measured(Pretender(Clock(), [900, 900, 8, 16, 16, 80]), power=watched)
    assert asked == [pytest.approx((1.8, 1.92))]
    found = result.as_json()
    assert (found["sm_clock_mhz"], found["power_w"], found["power_limited"]) == (1790, 703.2, True)


def test_the_share_is_of_the_bytes_of_the_steps_that_were_timed() -> None:
    result = measured(Pretender(Clock(), [8] * 6))
    each = [step_bytes(MICRO, [99 + step, 99 + step], 10).total for step in range(8)]
    assert result.read.total == pytest.approx(sum(each) / 8)
    assert result.share == pytest.approx(sum(each) / 8 / 1e9 / 1e-3)
    found = result.as_json()
    assert (found["rows"], found["context"], found["bytes"]) == (2, 100, round(sum(each) / 8))
    assert found["ms_per_step"] == 1.0
    assert [found[name] for name in ("sm_clock_mhz", "power_w", "power_limited")] == [None, None, None]


def test_every_launch_begins_at_the_same_positions_with_new_tokens() -> None:
    pretender = Pretender(Clock(), [8] * 6)
    measured(pretender, "2x100..300")
    assert {tuple(row.position for row in rows) for rows in pretender.seen} == {(99, 299)}
    assert len({row.token for rows in pretender.seen for row in rows}) > 6


def test_a_launch_that_is_no_measurement_is_refused() -> None:
    short = Pretender(Clock(), [8] * 6)
    short.short = 1
    with pytest.raises(BenchError, match="7 of 8 steps"):
        measured(short)
    ended = Pretender(Clock(), [8] * 6)
    ended.token = None
    with pytest.raises(BenchError, match="not of all rows"):
        measured(ended)
    broken = Pretender(Clock(), [8] * 6)
    broken.token = -1
    with pytest.raises(BenchError, match="not finite"):
        measured(broken)


def test_a_router_that_has_degenerated_is_noticed() -> None:
    # Two rows with 4 of 16 experts each use 7 of a layer's on average: 56 in 8 layers.
    assert measured(Pretender(Clock(), [8] * 6, experts=50 * 8)).spreads
    assert not measured(Pretender(Clock(), [8] * 6, experts=40 * 8)).spreads


def test_tables_reach_to_the_last_step_and_begin_at_the_window() -> None:
    points = [parse_point("2x1000"), parse_point("1x60")]
    pool = Pool(MICRO, points, METHOD, "cpu")
    for point in points:
        tables = pool.tables(point)
        for group in KVGroup:
            blocks = [block for table in tables for block in table[group] if block != NO_BLOCK]
            assert len(set(blocks)) == len(blocks)
            assert set(blocks) <= set(range(pool.cache.blocks[group]))
            assert {len(table[group]) for table in tables} == {blocks_for(point.contexts[0] + METHOD.steps)}
    (first, _) = pool.tables(points[0])
    gone = list(first[KVGroup.SLIDING]).count(NO_BLOCK)
    assert gone == (1000 - 256) // 64  # the block of the lowest position that the first step sees is kept
    assert NO_BLOCK not in first[KVGroup.FULL]
    assert all(torch.isfinite(pages).all() and pages.float().std() > 0.9 for pages in pool.cache.pages)


def test_the_pool_is_as_large_as_the_largest_point_needs() -> None:
    blocks = pool_blocks(MICRO, [Point((1000, 1000)), Point((3000,))], 16)
    assert blocks == {KVGroup.FULL: blocks_for(3016), KVGroup.SLIDING: 2 * (blocks_for(1016) - 11)}


def test_all_default_points_of_north_fit_an_h200() -> None:
    points = [parse_point(text) for text in ("16x8K", "1x256K", "8x1K..64K")]
    check_room(NORTH, points, Method(), 140 * 10**9)
    with pytest.raises(BenchError, match="do not fit"):
        check_room(NORTH, points, Method(), 64 * 10**9)
    with pytest.raises(BenchError, match="the model takes 500,000"):
        check_room(NORTH, [parse_point("1x500000")], Method(), 140 * 10**9)


def test_bandwidth_by_the_devices_name() -> None:
    assert bandwidth_of("NVIDIA H200") == 4.8e12
    assert bandwidth_of("NVIDIA H100 80GB HBM3") == 3.35e12
    assert bandwidth_of("NVIDIA H100 PCIe") == 2.0e12
    with pytest.raises(BenchError, match="--bandwidth"):
        bandwidth_of("NVIDIA GH200 480GB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(BenchError, match="needs a Hopper GPU"):
        next(bench_decode(MICRO, [parse_point("1x100")]))
