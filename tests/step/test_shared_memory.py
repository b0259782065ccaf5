"""How many pages a ring has: as many as shared memory has room for."""

from __future__ import annotations

import pytest

from headrace.model.presets import NORTH_MINI_CODE
from headrace.step.isa import ROW_CAPACITIES
from headrace.step.machine import SHARED_BYTES, Machine
from headrace.step.planner import build_plan
from headrace.step.shared_memory import MOST_PAGES, machine_for, shared_bytes
from headrace.step.sizes import sizes_of


@pytest.mark.parametrize("rows", ROW_CAPACITIES)
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_a_ring_takes_the_room_that_there_is(rows: int, tiles: int) -> None:
    sizes = sizes_of(NORTH_MINI_CODE, rows, 132)
    pages = machine_for(sizes, tiles).ring_pages
    assert shared_bytes(Machine(ring_pages=pages), sizes, tiles) <= SHARED_BYTES
    assert pages == MOST_PAGES or shared_bytes(Machine(ring_pages=pages + 1), sizes, tiles) > SHARED_BYTES


def test_a_plan_has_the_ring_that_fits_its_fullest_sm() -> None:
    plans = [build_plan(NORTH_MINI_CODE, rows=rows, sms=132) for rows in ROW_CAPACITIES]
    assert [plan.machine.ring_pages for plan in plans] == [12, 12, 11, 12, 11]
    # Eleven tiles of 512 bytes an SM, not two: 4,608 bytes more, and of 11 pages for two are 4,472 left.
    assert build_plan(NORTH_MINI_CODE, rows=16, sms=24).machine.ring_pages == 10
