"""Clocks that do not go alike between their anchors."""

from __future__ import annotations

import numpy as np

from headrace.kernel.trace import Trace, read_trace
from headrace.step.isa import Field
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.kernel.recorded import Recording, everything
from tests.step.configs import TINY

SMS = 5
PLAN = build_plan(TINY, rows=1, sms=SMS)
STEPS = 4


class Drifting(Recording):
    """SM 2 is 30 us ahead in the middle of the launch, SM 4 falls 20 us behind."""

    def __init__(self, plan: Plan, steps: int, length: float = 1000.0) -> None:
        self.length = length
        super().__init__(plan, steps, length)

    def drift(self, sm: int, microseconds: float) -> float:
        most = {2: 30.0, 4: -20.0}.get(sm, 0.0)
        return most * float(np.sin(np.pi * np.clip(microseconds / self.length, 0, 1)))


def disagreement(trace: Trace) -> float:
    """How far SMs are apart, at most, about when they saw the counters of a layer's X."""
    worst = 0.0
    waits = PLAN.descriptors[..., Field.WAIT_COUNTER]
    for counter in [number for number, name in enumerate(PLAN.counters) if name.startswith("down[")]:
        for step in range(STEPS):
            seen = np.where(waits == counter, trace.consumers.seen[:, step], np.inf).min(axis=1)
            worst = max(worst, float(np.ptp(seen[np.isfinite(seen)])))
    return worst


def test_what_all_sms_wait_for_brings_their_clocks_together() -> None:
    right, drifting = everything(PLAN, STEPS), everything(PLAN, STEPS, Drifting)
    apart = disagreement(read_trace(PLAN, STEPS, right))
    assert disagreement(read_trace(PLAN, STEPS, drifting)) < apart + 0.5
    trace, true = read_trace(PLAN, STEPS, drifting), read_trace(PLAN, STEPS, right)
    for name in ("ready", "taken", "seen", "end"):
        for ours, its in ((trace.consumers, true.consumers), (trace.copiers, true.copiers)):
            assert np.nanmax(np.abs(getattr(ours, name) - getattr(its, name))) < 2.0
    assert np.abs(trace.signals.end - true.signals.end).max() < 2.0
    assert np.array_equal(trace.signals.step, true.signals.step)


def test_without_common_waits_clocks_stay_as_their_anchors_say() -> None:
    """The same drift is seen where nobody waited: what the test above is about."""
    memory = everything(PLAN, STEPS, Drifting)
    anchors = Recording(PLAN, STEPS).memory.size - Recording(PLAN, STEPS).lines.nbytes
    lines = memory[anchors:].view(Recording(PLAN, STEPS).lines.dtype)
    lines["inputs"] = 0
    assert disagreement(read_trace(PLAN, STEPS, memory)) > 20
