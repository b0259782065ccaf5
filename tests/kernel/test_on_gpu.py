"""The kernel on a Hopper GPU against the oracle, buffer by buffer; and what must not change its bits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kernel.check.against_oracle import (
    BOUND,
    MARGIN,
    SETTINGS,
    Bench,
    buffer_errors,
    changed_by_capacity,
    changed_by_launches,
    changed_by_others,
    parting_margin,
    step_errors,
    worst,
)
from headrace.kernel.check.layer import left_by_last_layer
from headrace.kernel.launcher import Launcher, WatchdogError
from headrace.step.isa import Field, Opcode
from headrace.step.pack import pack_checkpoint
from headrace.step.plan import Plan
from tests.recording import RecordCheck

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MICRO = Path(__file__).parents[2] / "models" / "north-micro"


def launcher(bench: Bench, plan: Plan | None = None) -> Launcher:
    kernel = bench.kernel(plan=plan)
    assert isinstance(kernel, Launcher)
    return kernel


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_a_step_leaves_what_the_oracle_leaves(
    lengths: list[int], rows: int, hole: int | None, strict: bool, record_check: RecordCheck
) -> None:
    errors = step_errors(Bench(lengths, rows, hole), strict=strict)
    for buffer, error in errors.items():
        record_check(f"{buffer} after a step, {rows} rows{', by the book' * strict}", error, BOUND)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_tokens_are_the_oracles_up_to_a_near_tie(
    lengths: list[int], rows: int, hole: int | None, record_check: RecordCheck
) -> None:
    margin = parting_margin(Bench(lengths, rows, hole))
    record_check(f"tokens of six steps, {rows} rows, margin where they part", margin, MARGIN)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:])
def test_bits_do_not_depend_on_the_launch(
    lengths: list[int], rows: int, hole: int | None, record_check: RecordCheck
) -> None:
    """Sixteen steps at once, one by one with poisoned buffers in between, and by the book: all the same."""
    changed = changed_by_launches(Bench(lengths, rows, hole))
    record_check(f"what changes between one launch, many, and by the book, {rows} rows", changed, 0)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:])
def test_a_row_alone_has_the_same_bits(
    lengths: list[int], rows: int, hole: int | None, record_check: RecordCheck
) -> None:
    changed = changed_by_others(Bench(lengths, rows, hole))
    record_check(f"what changes when a row is alone, of {rows} rows", changed, 0)


def test_a_row_has_the_same_bits_at_every_capacity(record_check: RecordCheck) -> None:
    changed = changed_by_capacity([Bench([130], rows) for rows in (1, 2, 4, 8, 16)])
    record_check("what changes between capacities of 1, 2, 4, 8 and 16 rows", changed, 0)


def test_rows_of_one_sequence_see_one_another(record_check: RecordCheck) -> None:
    """The last tokens of a sequence as rows of one step give what the oracle gives."""
    bench = Bench([70], 4)
    (only,) = bench.world.rows()
    tokens = bench.world.sequences[0].tokens
    bench.rows = [replace(only, token=tokens[at], position=at) for at in range(66, 70)]
    bench.live = list(range(4))
    oracle, kernel = bench.oracle(), bench.kernel()
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    errors = buffer_errors(bench, kernel, oracle)
    record_check("worst buffer of four rows of one sequence", worst(errors), BOUND)


def test_the_first_layer_of_north_micro_leaves_what_the_oracle_leaves(record_check: RecordCheck) -> None:
    packed = pack_checkpoint(MICRO, device="cuda", dtype=torch.bfloat16, layers=1)
    for left in left_by_last_layer(packed):
        record_check(f"{left.name} after north-micro's first layer", left.error, BOUND)


def test_limits_and_stop_tokens_end_rows_and_launches() -> None:
    bench = Bench([130, 64], 2)
    free = list(launcher(bench).launch(bench.rows, 8))
    third = free[2][1]
    assert third is not None
    rows = [
        replace(row, max_tokens=5) if index == 0 else replace(row, stop_token_ids=frozenset({third}))
        for index, row in enumerate(bench.world.rows())
    ]
    ends = next(step for step, made in enumerate(free) if made[1] == third)
    made = list(launcher(bench).launch(rows, 16))
    assert len(made) == max(5, ends + 1)
    assert [tokens[0] for tokens in made[:5]] == [tokens[0] for tokens in free[:5]]
    assert all(tokens[1] is None for tokens in made[ends + 1 :])


def test_the_stop_flag_ends_a_launch_early_and_the_next_goes_on() -> None:
    bench = Bench([130], 1)
    whole = [tokens[0] for tokens in launcher(bench).launch(bench.rows, 16)]
    kernel = launcher(bench)
    made = [tokens[0] for tokens in kernel.launch(bench.rows, 16, lambda: True)]
    assert 1 <= len(made) <= 16
    assert made == whole[: len(made)]
    if len(made) < 16:
        (row,) = bench.world.rows()
        assert made[-1] is not None
        following = replace(row, token=made[-1], position=row.position + len(made))
        (tokens,) = kernel.launch([following], 1)
        assert tokens[0] == whole[len(made)]


def test_a_broken_counter_ends_in_a_named_error_and_the_kernel_can_go_on() -> None:
    bench = Bench([130], 1)
    words = bench.plan.descriptors.copy()
    norms = (words[..., Field.OPCODE] == Opcode.O_PROJ) & (words[..., Field.LAYER] == 1)
    sm, task = (int(part) for part in np.argwhere(norms)[0])
    words[sm, task, Field.WAIT_ARRIVALS] += 1
    kernel = launcher(bench, plan=replace(bench.plan, descriptors=words))
    with pytest.raises(WatchdogError, match=r"\[1\]"):
        list(kernel.launch(bench.rows, 1))
    assert math.isfinite(float(torch.ones(1, device="cuda")[0]))  # the GPU is still there
