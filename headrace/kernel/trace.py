"""What a launch recorded of its SMs: lines of their own clocks, brought onto one time.

The kernel writes them where it is compiled to do so (`variant_of(plan, trace=True)`); include/trace.h says
which thread writes what, and `records` how. `trace_clock` makes one time of all clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.kernel.records import TRACE_ANCHOR, TRACE_LANES, TRACE_LINE
from headrace.kernel.trace_clock import Clock, Corrections, Times
from headrace.step.isa import Field
from headrace.step.plan import Plan

_MOMENTS = ("ready", "taken", "seen", "end")


class Lane(IntEnum):
    """Whose lines; as in trace.h."""

    COPIER = 0
    CONSUMERS = 1
    PUBLISHER = 2
    LOADER = 3
    HELPER = 4


class TraceError(RuntimeError):
    """A launch that did not record itself to its end."""


@dataclass(frozen=True)
class Tasks:
    """Of one lane: every field is [SMs, steps, tasks], NaN where there was no task.

    Moments are microseconds since the launch's first, `inputs` microseconds of waits for counters, and of a
    loader for a free slot. `working` is what is left of a task, waits for pages in it; `queue` how long there
    was no task to take up.
    """

    ready: Times
    taken: Times
    seen: Times
    end: Times
    inputs: Times

    @property
    def queue(self) -> Times:
        return self.taken - self.ready

    @property
    def working(self) -> Times:
        return self.end - self.taken - self.inputs


@dataclass(frozen=True)
class Signals:
    """One entry for every signal: which SM gave it, to which counter, in which step, from when to when."""

    sm: npt.NDArray[np.int64]
    counter: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    taken: Times
    end: Times


@dataclass(frozen=True)
class Trace:
    """One launch of `plan`."""

    plan: Plan
    steps: int
    copiers: Tasks
    consumers: Tasks
    loaders: Tasks
    helpers: Tasks
    signals: Signals

    @cached_property
    def ends(self) -> Times:
        """When each step's last task ended, on any SM: [steps], microseconds."""
        return np.asarray(np.nanmax(self.consumers.end, axis=(0, 2)))

    @property
    def whole(self) -> range:
        """The steps that are typical: not the first, which begins with empty rings, if there are others."""
        return range(min(1, self.steps - 1), self.steps)

    @property
    def step_time(self) -> float:
        """Microseconds of a whole step, on average."""
        if self.steps == 1:
            return float(self.ends[0] - np.nanmin(self.consumers.ready))
        return float(self.ends[-1] - self.ends[0]) / (self.steps - 1)


def trace_bytes(plan: Plan, steps: int) -> int:
    """What a launch of so many steps writes at most."""
    lines = plan.sizes.sms * TRACE_LANES * _lines(plan, steps)
    return _anchors(plan) + lines * TRACE_LINE.itemsize


def read_trace(plan: Plan, steps: int, memory: npt.NDArray[np.uint8]) -> Trace:
    """Make sense of the `memory` that a launch of `steps` steps wrote to, which held zeros before.

    Raises TraceError if it did not come to its end.
    """
    sms, tasks = plan.sizes.sms, plan.descriptors.shape[1]
    anchors = memory[: _anchors(plan)].view(TRACE_ANCHOR).reshape(sms, 2)
    if not anchors["nanoseconds"].all():
        raise TraceError("the launch did not come to its end, so there is no trace of it")
    used = memory[_anchors(plan) : trace_bytes(plan, steps)]
    lines = used.view(TRACE_LINE).reshape(sms, TRACE_LANES, steps, tasks)
    clock = Clock(anchors)
    made = int((lines[:, Lane.CONSUMERS]["end"] != 0).any(axis=(0, 2)).sum())
    copiers, consumers, loaders, helpers = (
        _tasks(lines[:, lane, :made], clock)
        for lane in (Lane.COPIER, Lane.CONSUMERS, Lane.LOADER, Lane.HELPER)
    )
    signals = _signals(plan, lines[:, Lane.PUBLISHER].reshape(sms, -1), clock)
    right = Corrections(plan, consumers.seen, consumers.inputs)
    return Trace(
        plan,
        made,
        _corrected(copiers, right),
        _corrected(consumers, right),
        _corrected(loaders, right),
        _corrected(helpers, right),
        replace(signals, taken=right.of(signals.sm, signals.taken), end=right.of(signals.sm, signals.end)),
    )


def _anchors(plan: Plan) -> int:
    return plan.sizes.sms * 2 * TRACE_ANCHOR.itemsize


def _lines(plan: Plan, steps: int) -> int:
    """Of one lane of an SM."""
    return steps * int(plan.descriptors.shape[1])


def _tasks(lines: npt.NDArray[np.void], clock: Clock) -> Tasks:
    missing = lines["end"] == 0
    fields = {name: clock.moments(lines[name]) for name in _MOMENTS}
    fields["inputs"] = clock.spans(lines["inputs"])
    for values in fields.values():
        values[missing] = np.nan
    return Tasks(**fields)


def _corrected(tasks: Tasks, right: Corrections) -> Tasks:
    return replace(tasks, **{name: right.of_sms(getattr(tasks, name)) for name in _MOMENTS})


def _signals(plan: Plan, lines: npt.NDArray[np.void], clock: Clock) -> Signals:
    """An SM signals a counter equally often in every step, in order: so its lines tell their step."""
    sm, place = np.nonzero(lines["end"])
    counter = lines["task"][sm, place].astype(np.int64)
    per_step = signals_a_step(plan)
    seen: dict[tuple[int, int], int] = {}
    step = np.zeros(len(sm), dtype=np.int64)
    for index, key in enumerate(zip(sm.tolist(), counter.tolist(), strict=True)):
        step[index] = seen.get(key, 0) // max(int(per_step[key]), 1)
        seen[key] = seen.get(key, 0) + 1
    taken, end = (clock.moments(lines[name])[sm, place] for name in ("taken", "end"))
    return Signals(sm, counter, step, taken, end)


def signals_a_step(plan: Plan) -> npt.NDArray[np.int64]:
    """How often each SM signals each counter in a step: [SMs, counters]."""
    given = np.zeros((plan.sizes.sms, len(plan.counters)), dtype=np.int64)
    counters = plan.descriptors[..., Field.SIGNAL_COUNTER]
    np.add.at(given, (np.arange(plan.sizes.sms)[:, None], counters), 1)
    given[:, 0] = 0  # no counter
    return given
