"""How many pages may be under way, operation by operation."""

from __future__ import annotations

import pytest

from headrace.model.presets import NORTH_MINI_CODE
from headrace.step.isa import ROW_CAPACITIES, USED, Field, Opcode
from headrace.step.machine import Machine
from headrace.step.planner import build_plan

MACHINE = Machine(ring_pages=11, in_flight=3)


@pytest.mark.parametrize("rows", ROW_CAPACITIES)
def test_what_fits_a_ring_yields(rows: int) -> None:
    assert MACHINE.in_flight_of(Opcode.QKV_PROJ, rows, 11) == 1
    assert MACHINE.in_flight_of(Opcode.ROUTER, rows, 2) == 1
    assert MACHINE.in_flight_of(Opcode.O_PROJ, rows, 8) == (2 if rows <= 8 else 1)


@pytest.mark.parametrize("opcode", [Opcode.QKV_PROJ, Opcode.ROUTER, Opcode.O_PROJ])
def test_what_does_not_fit_a_ring_has_all_of_memory(opcode: Opcode) -> None:
    assert MACHINE.in_flight_of(opcode, 1, 12) == MACHINE.in_flight


def test_none_has_more_than_the_machine_but_experts_of_a_few_rows() -> None:
    one = Machine(in_flight=1)
    assert {one.in_flight_of(opcode, 1, 4) for opcode in Opcode} == {1}
    ups = [MACHINE.in_flight_of(Opcode.EXPERT_UP, rows, 100) for rows in ROW_CAPACITIES]
    assert ups == [3, 3, 4, 4, 3]


@pytest.mark.parametrize("rows", [1, 8])
def test_descriptors_say_it(rows: int) -> None:
    plan = build_plan(NORTH_MINI_CODE, rows=rows, sms=132)
    words = plan.descriptors
    for opcode in Opcode:
        own = words[words[..., Field.OPCODE] == opcode]
        fetches = Field.IN_FLIGHT in USED[opcode]
        assert (own[:, Field.IN_FLIGHT] > 0).all() == fetches or not len(own), opcode


@pytest.mark.parametrize(("sms", "pages", "under_way"), [(132, 10, 1), (100, 14, 3)])
def test_it_is_all_of_a_tasks_pages_that_have_to_fit_a_ring(sms: int, pages: int, under_way: int) -> None:
    """656 tiles of two pages of QKV and router: 5 tiles on the fullest of 132 SMs, 7 of 100."""
    words = build_plan(NORTH_MINI_CODE, rows=1, sms=sms, machine=MACHINE).descriptors
    own = words[words[..., Field.OPCODE] == Opcode.QKV_PROJ]
    assert (own[:, Field.TILE_COUNT] * own[:, Field.PAGES_PER_TILE]).max() == pages
    late = own[own[:, Field.LAYER] > 0]
    assert set(late[:, Field.IN_FLIGHT].tolist()) == {under_way}
