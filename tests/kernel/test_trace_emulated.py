"""A kernel that records itself, run on the host: every task of every SM leaves its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.kernel.check.against_oracle import Bench
from headrace.kernel.trace import signals_a_step
from headrace.kernel.trace_summary import hops, lines
from headrace.model.kv import KVCache
from headrace.step.isa import Field, Opcode
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan
from tests.kernel.emulated import COMPILER
from tests.kernel.emulated.decode import EmulatedKernel, compiled
from tests.kernel.emulated.libraries import SMS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
STEPS = 2


def test_a_launch_records_every_task_and_every_signal_through_the_publisher(tmp_path: Path) -> None:
    def make(
        plan: Plan, weights: PackedWeights, cache: KVCache, table_blocks: int, strict: bool
    ) -> EmulatedKernel:
        library = compiled(plan, tmp_path, strict=strict, trace=True)
        return EmulatedKernel(plan, weights, cache, table_blocks, library)

    bench = Bench([70, 33], 2, make=make, device="cpu", sms=SMS)
    kernel = bench.kernel()
    assert isinstance(kernel, EmulatedKernel)
    made = list(kernel.launch(bench.rows, STEPS))
    trace = kernel.traced(STEPS)
    assert trace.steps == len(made) == STEPS
    opcodes = trace.plan.descriptors[..., Field.OPCODE]
    # Merges are the helper's, and no row searches for a border.
    consumed = ~np.isin(opcodes, (Opcode.END, Opcode.ATTENTION_MERGE, Opcode.SAMPLE_SELECT))
    helped = np.isin(opcodes, (Opcode.EXPERT_UP, Opcode.ATTENTION_MERGE))
    for tasks, theirs in (
        (trace.consumers, consumed),
        (trace.copiers, consumed),
        (trace.loaders, consumed),
        (trace.helpers, helped),
    ):
        assert (np.isfinite(tasks.end) == theirs[:, None, :]).all()
        there = np.isfinite(tasks.end)
        for earlier, later in (("ready", "taken"), ("taken", "seen"), ("seen", "end")):
            assert (getattr(tasks, earlier)[there] <= getattr(tasks, later)[there]).all()
    for waiting in (trace.consumers, trace.loaders, trace.helpers):
        assert np.nanmax(waiting.inputs) > 0
    chosen = opcodes == Opcode.EXPERT_UP  # a loader goes on when the helper has chosen
    sm, task = np.nonzero(chosen)
    assert (trace.helpers.end[sm, :, task] <= trace.copiers.taken[sm, :, task]).all()
    # The warps that make QKV's, X's and the router's tiles signal them, the helper merges: no line is left.
    counters = {trace.plan.counters[number].split("[")[0] for number in trace.signals.counter}
    assert {"attention", "up"} <= counters
    assert not {"qkv", "down", "router", "merge"} & counters
    per_step = signals_a_step(trace.plan)
    assert len(trace.signals.sm) <= STEPS * per_step.sum()
    assert any(line.startswith("EXPERT_UP") for line in lines(trace))
    kinds = {hop.counter for hop in hops(trace)}
    assert {"attention", "pick"} <= kinds
    assert "select" not in kinds, "nobody signalled it or waited for it"
