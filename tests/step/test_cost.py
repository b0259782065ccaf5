"""The cost model: by hand on lists of a few tasks, and against what was measured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from headrace.model.presets import NORTH_MINI_CODE
from headrace.step.cost import Costs, Event, StandstillError, Timeline, Work, simulate
from headrace.step.isa import PAGE_BYTES_MAX as PAGE
from headrace.step.planner import build_plan
from headrace.step.workload import SKELETON_COSTS, plan_works, skeleton_works

# Round numbers: an SM copies a page in 1 us, gets it 3 us after asking or later, consumes it in 0.5 us.
ROUND = Costs(bandwidth=(PAGE, PAGE, PAGE), latency=3.0, hop=2.0, page=0.5, choice=0.25, groups=1)


def run(*lists: list[Work], ring: int = 4, cap: int = 4, costs: Costs = ROUND) -> Timeline:
    every = PAGE * len(lists)
    slower = replace(costs, bandwidth=(every, every, every))
    return simulate(lists, ring_pages=ring, in_flight=cap, costs=slower)


def work(pages: int, *, wait: int = 0, signal: int = 0, publishes: bool = False) -> Work:
    waits = (Event(0, wait, 1),) if wait else ()
    given = (signal, 1) if signal else None
    return Work("O_PROJ", 0, 0, pages, PAGE, waits, signal=given, publishes=publishes)


def test_pages_arrive_one_after_another() -> None:
    timeline = run([work(4)])
    assert timeline.landings == [[3.0, 4.0, 5.0, 6.0]]
    assert timeline.step_time == 6.5  # the last page is consumed
    assert timeline.bytes_of(0) == 4 * PAGE


def test_the_ring_is_full_until_a_page_is_consumed() -> None:
    timeline = run([work(3)], ring=1)
    assert timeline.issues == [[0.0, 3.5, 7.0]]
    assert timeline.step_time == 10.5


def test_the_cap_holds_pages_back_until_one_has_landed() -> None:
    assert run([work(4)], cap=2).issues == [[0.0, 0.0, 3.0, 4.0]]


def test_a_page_that_is_held_returns_with_the_next_one() -> None:
    held = replace(ROUND, held=True)
    assert run([work(4)], costs=held).releases == [[4.0, 5.0, 6.0, 6.5]]


def test_groups_take_pages_in_turn() -> None:
    """Two groups together are as fast as one, each of them half as fast."""
    pair = replace(ROUND, groups=2, page=2.0)
    assert run([work(3)], costs=pair).releases == [[7.0, 8.0, 11.0]]


def test_a_hop_is_publication_signal_and_reading_back() -> None:
    first = [work(1, signal=1, publishes=True)]
    second = [work(2, wait=1)]
    timeline = run(first, second)
    [span] = timeline.spans[1]
    assert span.begin == 3.5 + 3.0 + 2.0 + 3.0  # consumed, stored, seen, read
    assert timeline.landings[1] == [3.0, 4.0]  # pages do not wait for activations
    assert span.end == span.begin + 1.0


def test_only_the_first_task_after_a_signal_reads_it_back() -> None:
    timeline = run([work(1, signal=1)], [work(1, wait=1), work(1, wait=1)])
    first, second = timeline.spans[1]
    assert second.begin == first.end


@pytest.mark.parametrize(("blocking", "begin"), [(True, 6.5), (False, 3.5)])
def test_who_waits_for_a_result_to_leave(blocking: bool, begin: float) -> None:
    costs = replace(ROUND, blocking=blocking)
    timeline = run([work(1, signal=1, publishes=True), work(1)], costs=costs)
    assert timeline.spans[0][1].begin == begin


def test_a_loader_that_waits() -> None:
    later = Work("EXPERT_UP", 0, 0, 1, PAGE, loader=Event(0, 1, 1), chooses=True)
    timeline = run([work(1, signal=1), work(1), later])
    assert timeline.issues[0][2] == 3.5 + 2.0 + 0.25


def test_a_signal_of_the_step_before() -> None:
    """What a step waits for from before the first has been there always."""
    works = [
        Work("ATTENTION", 0, step, 1, PAGE, loader=Event(step - 1, 1, 1), signal=(1, 1)) for step in (0, 1)
    ]
    timeline = run(works)
    assert timeline.issues == [[2.0, 2.0 + 3.5 + 2.0]]
    assert timeline.steps == 2
    assert timeline.step_time == timeline.end_of(1) - timeline.end_of(0)


def test_lists_that_wait_for_each_other() -> None:
    with pytest.raises(StandstillError, match="2 tasks wait"):
        run([work(1, wait=2, signal=1)], [work(1, wait=1, signal=2)])


works_of = cache(skeleton_works)


@cache
def skeleton(ring: int, order: int = 0) -> float:
    """Predicted milliseconds of the measured skeleton."""
    timeline = simulate(works_of(order), ring_pages=ring, in_flight=3, costs=SKELETON_COSTS)
    assert timeline.bytes_of(0) / 1e9 == pytest.approx(7.17, abs=0.005)  # what the measurement read
    return timeline.step_time / 1000


# Measured on an H200; the same constants for all, none of which comes from these runs.
@pytest.mark.parametrize(
    ("ring", "measured", "within"),
    [(12, 1.636, 0.03), (10, 1.667, 0.04), (8, 1.696, 0.04), (6, 1.800, 0.04), (4, 2.085, 0.06)],
)
def test_the_skeleton_is_predicted(ring: int, measured: float, within: float) -> None:
    assert skeleton(ring) == pytest.approx(measured, rel=within)


def test_what_the_skeleton_would_lose_by_another_order() -> None:
    """The model sees what the second order loses; of the first one's four percent it sees nothing."""
    assert skeleton(12, order=1) == pytest.approx(1.704, rel=0.06)
    assert skeleton(12, order=2) == pytest.approx(1.755, rel=0.06)
    assert skeleton(12, order=2) > skeleton(12)


def test_a_smaller_ring_is_slower() -> None:
    times = [skeleton(ring) for ring in (4, 6, 8, 10, 12)]
    assert times == sorted(times, reverse=True)


def test_the_plan_of_north() -> None:
    plan = build_plan(NORTH_MINI_CODE, rows=1, sms=132)
    works = plan_works(plan, context=8192, steps=1)
    timeline = simulate(
        works, ring_pages=plan.machine.ring_pages, in_flight=plan.machine.in_flight, costs=Costs()
    )
    # Megabytes by hand: 48 sparse layers, the dense one, the head, keys and values.
    assert timeline.bytes_of(0) / 1e6 == pytest.approx(5460 + 75 + 1074 + 520, rel=0.002)
    assert 0.85 < timeline.share < 0.95
