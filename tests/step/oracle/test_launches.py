"""Launches of several steps: rows that end, rows that are absent, the stop flag, launch after launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.step.oracle.order import RandomOrder
from headrace.step.oracle.rows import LaunchRow
from tests.step.oracle.setting import World, north, tokens_of


@pytest.fixture(scope="module")
def world() -> World:
    return World(north(), [90, 64, 3, 128])


@pytest.fixture(scope="module")
def greedy(world: World) -> list[list[int]]:
    return World(north(), [90, 64, 3, 128]).greedy(world.rows(), 8)


@pytest.mark.parametrize("seed", range(3))
def test_rows_end_by_themselves(world: World, greedy: list[list[int]], seed: int) -> None:
    rows = world.rows()
    first_stop = greedy[1][4]
    assert first_stop not in greedy[1][:4]
    limited = [
        replace(rows[0], max_tokens=3),
        replace(rows[1], stop_token_ids=frozenset({first_stop})),
        rows[2],
        replace(rows[3], max_tokens=1),
    ]
    oracle = world.oracle(rows=4, sms=3, order=RandomOrder(seed))
    made = [tokens_of(results) for results in oracle.launch(limited, 8)]
    lengths = [3, 5, 8, 1]
    for row, length in enumerate(lengths):
        column = [tokens[row] for tokens in made]
        assert column == [*greedy[row][:length], *[None] * (8 - length)]


def test_a_launch_ends_with_its_last_row(world: World) -> None:
    oracle = world.oracle(rows=4, sms=2)
    rows = [replace(row, max_tokens=2) for row in world.rows()]
    assert len(list(oracle.launch(rows, 8))) == 2


def test_absent_rows_change_nothing(world: World, greedy: list[list[int]]) -> None:
    rows: list[LaunchRow | None] = [None, *world.rows()[:2], None]
    oracle = world.oracle(rows=8, sms=3)
    made = [tokens_of(results) for results in oracle.launch(rows, 3)]
    assert made == [[None, greedy[0][step], greedy[1][step], None] for step in range(3)]


def test_the_stop_flag_ends_a_launch_after_its_step(world: World, greedy: list[list[int]]) -> None:
    oracle = world.oracle(rows=4, sms=3, order=RandomOrder(7))
    told: list[int | None] = []
    for results in oracle.launch(world.rows(), 8, stop=lambda: len(told) >= 2):
        told.append(tokens_of(results)[0])
    assert told in (greedy[0][:3], greedy[0][:4])  # an SM may have begun the step after


def test_launch_after_launch(world: World, greedy: list[list[int]]) -> None:
    """Counters go on counting; also after a launch that nobody waited for."""
    oracle = world.oracle(rows=4, sms=3)
    rows = world.rows()
    first = [tokens_of(results) for results in oracle.launch(rows, 2)]
    abandoned = oracle.launch(rows, 8)
    next(abandoned)
    abandoned.close()
    fed = [
        replace(row, token=tokens[1], position=row.position + 2)
        for row, tokens in zip(rows, greedy, strict=True)
    ]
    second = [tokens_of(results) for results in oracle.launch(fed, 3)]
    assert [list(column) for column in zip(*first, *second, strict=True)] == [tokens[:5] for tokens in greedy]


@pytest.mark.parametrize("count", [0, 5])
def test_rows_that_do_not_fit_are_refused(world: World, count: int) -> None:
    oracle = world.oracle(rows=4, sms=1)
    with pytest.raises(ValueError, match="1 to 4 rows"):
        next(oracle.launch((world.rows() * 2)[:count]))
