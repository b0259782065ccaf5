"""A row's bits: the same alone and in company, at any place, in any order, on any number of SMs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.step.oracle.order import Order, RandomOrder
from tests.step.oracle.setting import WINDOW, World, north

LENGTHS = (100, WINDOW, 200, 5, 64, 65, 33)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def world(request: pytest.FixtureRequest) -> World:
    return World(north(), LENGTHS, dtype=request.param)


def logits_of(
    world: World, places: list[int | None], *, rows: int, sms: int, order: Order | None = None
) -> dict[int, npt.NDArray[np.float32]]:
    """The logits of sequences at these places of a launch, after two steps."""
    oracle = world.oracle(rows=rows, sms=sms, order=order)
    every = world.rows()
    list(oracle.launch([None if number is None else every[number] for number in places], 2))
    return {number: oracle.logits()[index] for index, number in enumerate(places) if number is not None}


def test_company_place_order_and_machine_do_not_matter(world: World) -> None:
    alone = logits_of(world, [2], rows=1, sms=2)[2]
    assert np.isfinite(alone).all()
    together = logits_of(world, [6, 5, 4, 2, None, 3, 1, 0], rows=8, sms=3, order=RandomOrder(3))
    other = logits_of(world, [0, 1, 2, 3, 4, 5, 6], rows=16, sms=7, order=RandomOrder(4))
    np.testing.assert_array_equal(alone, together[2])
    for number in range(len(LENGTHS)):
        np.testing.assert_array_equal(together[number], other[number])
    assert not np.array_equal(together[0], together[1])


@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_the_same_bits(world: World, seed: int) -> None:
    places: list[int | None] = [1, 0, 3]
    planned = logits_of(world, places, rows=4, sms=3)
    shuffled = logits_of(world, places, rows=4, sms=3, order=RandomOrder(seed))
    for number in (0, 1, 3):
        np.testing.assert_array_equal(planned[number], shuffled[number])


def test_how_the_past_came_about_does_not_matter(world: World) -> None:
    """Token by token, or as rows of one step."""
    row = world.rows()[0]
    tokens = [11, 12, 13]
    fed = [replace(row, token=token, position=row.position + n) for n, token in enumerate(tokens)]
    one_by_one = world.oracle(rows=4, sms=2)
    for each in fed:
        list(one_by_one.launch([each], 1))
    at_once = world.oracle(rows=4, sms=2)
    list(at_once.launch(fed, 1))
    np.testing.assert_array_equal(one_by_one.logits()[0], at_once.logits()[2])
