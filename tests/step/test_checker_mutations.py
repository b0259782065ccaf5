"""Fields of single tasks changed, one by one and at random: the checker sees it, unless it does no harm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.step.checker import check
from headrace.step.isa import USED, Field, Opcode
from tests.step.breaking import PLAN, SMS, where

# Waits of one task that something else makes sure of already (test_checker.REDUNDANT says what, for all tasks
# at once; for one task there are more), the first of no tiles, and how fast pages come.
HARMLESS = {
    (Opcode.ATTENTION, Field.LOADER_COUNTER),
    (Opcode.ATTENTION, Field.LOADER_LAG),
    (Opcode.ATTENTION_MERGE, Field.WAIT_COUNTER),
    (Opcode.EXPERT_UP, Field.WAIT_COUNTER),
    (Opcode.EXPERT_UP, Field.SECOND_COUNTER),
    (Opcode.EXPERT_DOWN, Field.WAIT_COUNTER),
    (Opcode.EXPERT_DOWN, Field.SECOND_COUNTER),
    (Opcode.EXPERT_DOWN, Field.LOADER_COUNTER),
    (Opcode.EXPERT_DOWN, Field.LOADER_LAG),
    (Opcode.FFN_UP, Field.WAIT_COUNTER),
    (Opcode.FFN_DOWN, Field.WAIT_COUNTER),
    (Opcode.QKV_PROJ, Field.WAIT_COUNTER),
    (Opcode.SAMPLE_PICK, Field.SECOND_COUNTER),
    (Opcode.SAMPLE_STATS, Field.FIRST_TILE),
    (Opcode.SAMPLE_SELECT, Field.FIRST_TILE),
    (Opcode.SAMPLE_PICK, Field.FIRST_TILE),
    *((opcode, Field.IN_FLIGHT) for opcode in Opcode),
}


@pytest.mark.parametrize("opcode", [opcode for opcode in Opcode if opcode is not Opcode.END])
def test_every_field_is_looked_at(opcode: Opcode) -> None:
    sms, tasks = where(PLAN.descriptors, opcode)
    unnoticed = set()
    for field in USED[opcode]:
        words = PLAN.descriptors.copy()
        words[sms[-1], tasks[-1], field] += 1
        if not check(replace(PLAN, descriptors=words)):
            unnoticed.add((opcode, field))
    assert unnoticed <= HARMLESS


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(sm=st.integers(0, SMS - 1), data=st.data())
def test_a_changed_field_is_noticed(sm: int, data: st.DataObject) -> None:
    words = PLAN.descriptors.copy()
    task = data.draw(st.integers(0, int(PLAN.lengths[sm]) - 1))
    opcode = Opcode(words[sm, task, Field.OPCODE])
    field = data.draw(st.sampled_from(USED[opcode]))
    assume((opcode, field) not in HARMLESS)
    value = int(words[sm, task, field])
    others = st.sampled_from([value - 1, value + 1, 2 * value, 0]) | st.integers(0, len(PLAN.counters) - 1)
    words[sm, task, field] = data.draw(others.filter(lambda other: other != value))
    assert check(replace(PLAN, descriptors=words))
