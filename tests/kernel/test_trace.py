"""A launch's record: many clocks, brought onto one time; and what it costs a kernel that does not record."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from headrace.kernel import build as building
from headrace.kernel.build import compile_source
from headrace.kernel.trace import Lane, Trace, TraceError, read_trace, signals_a_step, trace_bytes
from headrace.kernel.variant import variant_of
from headrace.model.presets import PRESETS
from headrace.step.isa import Field
from headrace.step.planner import build_plan
from tests.kernel.recorded import Recording, everything, places_of
from tests.step.configs import TINY

PLAN = build_plan(TINY, rows=1, sms=3)


def test_clocks_of_all_sms_are_brought_onto_one_time() -> None:
    recording = Recording(PLAN, 1)
    for sm in range(3):
        recording.task(Lane.CONSUMERS, sm, 0, 4, (10, 11, 12, 20))
        recording.task(Lane.COPIER, sm, 0, 0, (-2, -1, -1, 5))  # before the anchor
    trace = read_trace(PLAN, 1, recording.memory)
    assert trace.consumers.taken[:, 0, 4] == pytest.approx([11] * 3, abs=1e-3)
    assert trace.copiers.ready[:, 0, 0] == pytest.approx([-2] * 3, abs=1e-3)
    assert trace.copiers.end[:, 0, 0] == pytest.approx([5] * 3, abs=1e-3)


def test_fields_and_what_follows_from_them() -> None:
    recording = Recording(PLAN, 1)
    recording.task(Lane.CONSUMERS, 1, 0, 4, (10, 11, 12.5, 20), 1.25)
    trace = read_trace(PLAN, 1, recording.memory)
    found = trace.consumers
    values = [
        float(field[1, 0, 4]) for field in (found.ready, found.taken, found.seen, found.end, found.inputs)
    ]
    assert values == pytest.approx([10, 11, 12.5, 20, 1.25], abs=1e-3)
    assert found.working[1, 0, 4] == pytest.approx(20 - 11 - 1.25, abs=2e-3)
    assert found.queue[1, 0, 4] == pytest.approx(1, abs=1e-3)
    assert np.isnan(found.end[0]).all()  # nothing was recorded there
    assert np.isnan(found.inputs[0]).all()


def whole(steps: int = 3) -> Trace:
    return read_trace(PLAN, steps, everything(PLAN, steps))


def test_every_task_of_a_launch() -> None:
    trace = whole()
    there = ~np.isnan(trace.consumers.end)
    assert (there.sum(axis=(1, 2)) == PLAN.lengths * 3).all()
    assert trace.steps == 3
    assert list(trace.whole) == [1, 2]
    assert trace.step_time == pytest.approx(max(places_of(PLAN).values()) + 1, rel=1e-3)


def test_signals_find_their_step() -> None:
    trace, per_step = whole(), signals_a_step(PLAN)
    signals = trace.signals
    assert len(signals.sm) == 3 * per_step.sum()
    for step in range(3):
        found = np.zeros_like(per_step)
        np.add.at(found, (signals.sm[signals.step == step], signals.counter[signals.step == step]), 1)
        assert (found == per_step).all()
    assert per_step.sum() == (PLAN.descriptors[..., Field.SIGNAL_COUNTER] != 0).sum()


def test_a_launch_that_was_stopped_has_fewer_steps() -> None:
    longer = np.zeros(trace_bytes(PLAN, 3), dtype=np.uint8)
    recording = Recording(PLAN, 3)
    recording.task(Lane.CONSUMERS, 0, 0, 0, (1, 2, 3, 4))
    assert read_trace(PLAN, 3, recording.memory).consumers.end.shape[1] == 1
    with pytest.raises(TraceError, match="did not come to its end"):
        read_trace(PLAN, 3, longer)


def test_a_kernel_that_records_compiles(tmp_path: Path) -> None:
    """A few bytes of local memory would not change what is seen; many would."""
    variant = variant_of(build_plan(PRESETS["north-micro-shape"], rows=1, sms=132), trace=True)
    assert building.build(variant, cache=tmp_path).resources.spill_stores <= 32


def test_a_kernel_that_does_not_record_is_the_same_with_and_without_the_recorder() -> None:
    """Every function of trace.h emptied: the machine code stays what it is, byte for byte."""
    variant = variant_of(build_plan(PRESETS["north-micro-shape"], rows=1, sms=132))
    headers = {**building.STANDARD, **building.fixed_headers(), **variant.headers}
    emptied = re.sub(r"(?ms)^  if constexpr \(variant::TRACE\) \{.*?^  \}$", "", headers["trace.h"])
    emptied = re.sub(r"(?ms)^    if constexpr \(variant::TRACE\) \{.*?^    \}$", "", emptied)
    assert not re.search(r"variant::TRACE\b", emptied)
    with_it, _ = compile_source(building.SOURCE, headers)
    without, _ = compile_source(building.SOURCE, headers | {"trace.h": emptied})
    assert with_it == without
