"""The checker finds nothing in plans as they are, and no wait in them can be left out unnoticed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.config import ModelConfig, Rope
from headrace.model.presets import NORTH_MINI_CODE, PRESETS
from headrace.step.checker import Check, budget, check, require_sound
from headrace.step.errors import PlanError
from headrace.step.isa import ROW_CAPACITIES, Field, Opcode
from headrace.step.machine import CONSUMER_REGISTERS, Machine
from headrace.step.plan import Words
from headrace.step.planner import build_plan
from tests.step.breaking import PLAN, SMS, assign, broken, counter, drop, where
from tests.step.configs import TINY, configs


@pytest.mark.parametrize("rows", [1, 16])
def test_north_is_planned_sooner_than_it_is_checked_and_sound(rows: int) -> None:
    """An eighth of the time: 0.2 seconds where its check takes 1.6."""
    begun = time.thread_time()
    plan = build_plan(NORTH_MINI_CODE, rows=rows, sms=132)
    planned = time.thread_time()
    assert check(plan) == []
    assert planned - begun < time.thread_time() - planned


@pytest.mark.parametrize("name", ["north-micro-shape", "smollm2-135m"])
@pytest.mark.parametrize("sms", [1, 3, 78])
def test_small_models_have_sound_plans(name: str, sms: int) -> None:
    assert check(build_plan(PRESETS[name], rows=4, sms=sms)) == []


@settings(max_examples=40)
@given(config=configs(), rows=st.sampled_from(ROW_CAPACITIES), sms=st.integers(1, 40))
def test_random_models_have_sound_plans(config: ModelConfig, rows: int, sms: int) -> None:
    require_sound(build_plan(config, rows=rows, sms=sms))


def test_a_step_whose_selection_rounds_are_all_idle_is_sound() -> None:
    """Rounds that no row needs do not wait, so nothing else may count on their waits."""

    def change(words: Words) -> None:
        drop(Opcode.SAMPLE_SELECT)(words)
        assign(Opcode.SAMPLE_PICK, None, one=False, wait_counter=counter("stats"), wait_arrivals=SMS)(words)

    faults = broken(change)
    missing_rounds = {fault for fault in faults if fault.opcode is Opcode.SAMPLE_SELECT}
    unwritten = {fault for fault in faults if "TIES[1], which nothing has written" in fault.message}
    assert set(faults) == missing_rounds | unwritten


# Waits that repeat what others make sure of already.
REDUNDANT = {
    (Opcode.EXPERT_UP, "WAIT"),  # every SM has waited for X before, in QKV_PROJ
    (Opcode.EXPERT_UP, "SECOND"),  # the loader waits for the same
    (Opcode.EXPERT_DOWN, "SECOND"),
    (Opcode.EXPERT_DOWN, "LOADER"),
    (Opcode.FFN_UP, "WAIT"),
    (Opcode.SAMPLE_PICK, "SECOND"),
}


@pytest.mark.parametrize("wait", ["WAIT", "SECOND", "LOADER"])
def test_no_wait_can_be_left_out_unnoticed(wait: str) -> None:
    """Left out everywhere, every kind of wait is missed, but for those known to be redundant."""
    unnoticed = set()
    for opcode in Opcode:
        places = where(PLAN.descriptors, opcode)
        if not PLAN.descriptors[(*places, Field[f"{wait}_COUNTER"])].any():
            continue
        none = {f"{wait}_counter".lower(): 0, f"{wait}_arrivals".lower(): 0}
        if not broken(assign(opcode, None, one=False, **none)):
            unnoticed.add((opcode, wait))
    assert unnoticed == {known for known in REDUNDANT if known[1] == wait}


@pytest.mark.parametrize(
    ("config", "rows", "sms", "machine", "message"),
    [
        (TINY, 1, 4, Machine(ring_pages=14), "SM 0: .* bytes of shared memory .14 pages of ring"),
        (TINY, 1, 4, Machine(ring_pages=2, in_flight=3), "SM 0: 3 pages in flight do not fit a ring of 2"),
        (NORTH_MINI_CODE, 16, 1, Machine(), "EMBED, SM 0: .* 256 residual tiles"),
        (
            replace(TINY, hidden_size=8192, layers=TINY.layers[:1]),
            1,
            16,
            Machine(),
            "QKV_PROJ, layer 0, SM 0: 1 rows of 8192 activations",
        ),
    ],
)
def test_budgets_are_kept(config: ModelConfig, rows: int, sms: int, machine: Machine, message: str) -> None:
    plan = build_plan(config, rows=rows, sms=sms, machine=machine)
    with pytest.raises(PlanError, match=f"budget: .*{message}" if "SM" not in message else message):
        require_sound(plan)
    assert {fault.check for fault in check(plan)} == {Check.BUDGET}


def test_registers_that_a_block_has_not_are_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of 128 threads with 8 more each: 2,048 above the 64,512 of a block."""
    monkeypatch.setattr(budget, "CONSUMER_REGISTERS", CONSUMER_REGISTERS + 8)
    assert [str(fault) for fault in check(PLAN)] == [
        "budget: the threads of a block take 66560 registers of 64512"
    ]


@pytest.mark.parametrize(
    ("vocabulary", "sms", "pages"), [(262_144, 1, 65_536), (262_136, 1, None), (262_144, 2, None)]
)
def test_an_order_has_no_more_pages_than_it_can_count(vocabulary: int, sms: int, pages: int | None) -> None:
    """8 rows of 2,048 bfloat16 numbers are two pages of 16 KiB: North's head has 2 * 262,144 / 8 of them."""
    plan = build_plan(replace(NORTH_MINI_CODE, vocab_size=vocabulary), rows=1, sms=sms)
    words = plan.descriptors[where(plan.descriptors, Opcode.LM_HEAD)]
    counted = words[:, Field.TILE_COUNT].astype(int) * words[:, Field.PAGES_PER_TILE]
    assert counted.sum() == 2 * vocabulary // 8
    if pages is None:
        assert check(plan) == []
        return
    assert pages % 2**16 == 0, "the kernel would have read none"
    with pytest.raises(PlanError, match=f"budget: LM_HEAD, SM 0: {pages} pages are more than the 65535"):
        require_sound(plan)
    assert {fault.check for fault in check(plan)} == {Check.BUDGET}


def test_half_split_layers_can_be_planned_in_a_parallel_block() -> None:
    layers = tuple(replace(layer, rope=Rope.HALF_SPLIT) for layer in TINY.layers)
    assert check(build_plan(replace(TINY, layers=layers), rows=1, sms=7)) == []
