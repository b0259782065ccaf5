"""What a trace says in figures: where each operation's time goes, and what every hop costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.kernel.trace import Signals, Tasks, Trace
from headrace.kernel.trace_clock import Times
from headrace.step.isa import Field, Opcode
from headrace.step.plan import Plan

_IMMEDIATE = 0.05  # microseconds: an input waited for no longer than this was there already


@dataclass(frozen=True)
class OperationTime:
    """Microseconds that one lane of an SM spends on an operation in a step, all layers together, on average
    over SMs.

    `total` is the sum of the others: `queue` for a task to be handed over, `inputs` for counters, and the
    rest, `working`, in which waits for pages are.
    """

    operation: str
    tasks: float
    total: float
    queue: float
    inputs: float
    working: float


@dataclass(frozen=True)
class Hop:
    """The hops through the counters of one kind, such as qkv: microseconds.

    `exposed` is how long an SM's consumers wait for it in a step, all layers together, on average over SMs,
    and `each` the same for one layer. Of each hop, in the middle: `slowest` is from the signal that half of
    the others had given to the last one, `latency` from the last signal to when a waiting SM has seen it (NaN
    where it is not known, since tasks wait for those of some heads only).
    """

    counter: str
    hops: int
    exposed: float
    each: float
    slowest: float
    latency: float


def operation_times(trace: Trace, tasks: Tasks | None = None) -> list[OperationTime]:
    """In the order of the opcodes; of the consumers, or of the lane whose `tasks` are given.

    Operations that it did not do are left out.
    """
    tasks = trace.consumers if tasks is None else tasks
    opcodes = trace.plan.descriptors[..., Field.OPCODE]
    steps = list(trace.whole)
    found = []
    for opcode in Opcode:
        mine = (opcodes == opcode)[:, None, :]
        if opcode is Opcode.END or not (mine & np.isfinite(tasks.end[:, steps])).any():
            continue

        def mean(values: Times, mine: npt.NDArray[np.bool_] = mine) -> float:
            """Of a step and an SM."""
            return float(np.where(mine, np.nan_to_num(values[:, steps]), 0).sum()) / len(steps) / len(opcodes)

        parts = [mean(part) for part in (tasks.queue, tasks.inputs, tasks.working)]
        count = float(mine.sum()) / len(opcodes)
        found.append(OperationTime(opcode.name, count, sum(parts), *parts))
    return found


def hops(trace: Trace) -> list[Hop]:
    """Those that cost most first."""
    plan = trace.plan
    kinds = {kind: counters for kind, counters in _kinds(plan).items() if kind}
    last, middle = _signal_times(trace.signals, trace.steps, len(plan.counters))
    waited, waits = plan.descriptors[..., Field.WAIT_COUNTER], plan.descriptors[..., Field.WAIT_SPAN]
    found = []
    for kind, counters in kinds.items():
        mine = np.isin(waited, counters)
        if not mine.any():
            continue
        steps = list(trace.whole)
        inputs = np.where(mine[:, None, :], np.nan_to_num(trace.consumers.inputs[:, steps]), 0)
        exposed = float(inputs.sum()) / len(steps) / plan.sizes.sms
        groups = len(np.unique(waited[mine]))
        spreads = (last - middle)[steps][:, counters]
        if not exposed and not np.isfinite(spreads).any():
            continue  # nobody signalled or waited: searches that the launch left out
        found.append(
            Hop(
                kind,
                groups,
                exposed,
                exposed / groups,
                float(np.nanmedian(spreads)) if np.isfinite(spreads).any() else float("nan"),
                _latency(trace, last, mine & (waits <= 1)),
            )
        )
    return sorted(found, key=lambda hop: -hop.exposed)


def kind_of(counter: str) -> str:
    """The name of a counter without its layer and head."""
    return re.sub(r"\[.*", "", counter)


def _kinds(plan: Plan) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for number, name in enumerate(plan.counters):
        if number:
            kinds.setdefault(kind_of(name), []).append(number)
    return kinds


def _signal_times(signals: Signals, steps: int, counters: int) -> tuple[Times, Times]:
    """When each counter got its last signal, and when it had got half of them: [steps, counters]."""
    last = np.full((steps, counters), np.nan)
    middle = np.full((steps, counters), np.nan)
    kept = signals.step < steps
    keys = (signals.step * counters + signals.counter)[kept]
    ends = signals.end[kept]
    order = np.lexsort((ends, keys))
    keys, ends = keys[order], ends[order]
    borders = np.flatnonzero(np.diff(keys, prepend=-1, append=-1))
    for begin, end in pairwise(borders.tolist()):
        place = divmod(int(keys[begin]), counters)
        last[place], middle[place] = ends[end - 1], ends[(begin + end - 1) // 2]
    return last, middle


def _latency(trace: Trace, last: Times, tasks: npt.NDArray[np.bool_]) -> float:
    """From the last signal to when it was seen, where somebody waited for it: the median."""
    sm, task = np.nonzero(tasks)
    words = trace.plan.descriptors[sm, task]
    first, second = (
        words[:, Field.WAIT_COUNTER],
        words[:, Field.SECOND_COUNTER],
    )  # 0, none, is never signalled
    found = []
    for step in trace.whole:
        inputs = trace.consumers.inputs[sm, step, task]
        there = inputs > _IMMEDIATE
        complete = np.fmax(last[step, first], last[step, second])
        found.append((trace.consumers.seen[sm, step, task] - complete)[there])
    every = np.concatenate(found)
    every = every[~np.isnan(every)]
    return float(np.median(every)) if len(every) else float("nan")


def lines(trace: Trace) -> Iterator[str]:
    """The summary as text."""
    yield f"{trace.steps} steps recorded; {trace.step_time:.1f} us a step"
    yield ""
    yield "an SM's consumers in a step, us (all layers together, average of all SMs)"
    heading = ("operation", "tasks", "total", "no task", "inputs", "working")
    yield _row(*heading)
    times = operation_times(trace)
    yield from _rows(times)
    sums = [sum(getattr(time, name) for time in times) for name in ("total", "queue", "inputs", "working")]
    yield _row("all", "", *(f"{part:.1f}" for part in sums))
    yield ""
    yield "its helper: the choice of experts is EXPERT_UP's (no task: what it is at from task to task)"
    yield from _rows(operation_times(trace, trace.helpers))
    yield ""
    yield "its loader (inputs: a free slot, the choice of experts, the step before)"
    yield from _rows(operation_times(trace, trace.loaders))
    yield ""
    yield "hops, us: waits in a step, and each; medians of the last signal after half of them, and of its way"
    yield _row("counter", "hops", "exposed", "each", "slowest", "latency")
    for hop in hops(trace):
        figures = (f"{hop.exposed:.1f}", f"{hop.each:.2f}", f"{hop.slowest:.2f}", f"{hop.latency:.2f}")
        yield _row(hop.counter, str(hop.hops), *figures)


def memory_lines(trace: Trace, read: Mapping[Opcode, float]) -> Iterator[str]:
    """How fast each operation's pages are asked for, as text: `read` has the bytes of a step, of all SMs.

    The copiers of all SMs are at it side by side, so the rate is the bytes over the time of one, in which
    waits for a free slot of the ring and for an order are: who is far below the memory's bandwidth names the
    operation in which memory rests.
    """
    yield "its copier: MB that all SMs read in a step, and TB/s (no task: nothing was ordered)"
    yield _row("operation", "tasks", "total", "no task", "MB", "TB/s")
    at_work = bytes_read = 0.0
    for time in operation_times(trace, trace.copiers):
        if not (size := read.get(Opcode[time.operation], 0.0)):
            continue
        at_work, bytes_read = at_work + time.total, bytes_read + size
        yield _memory_row(time.operation, f"{time.tasks:.1f}", time.total, f"{time.queue:.1f}", size)
    yield _memory_row("all", "", at_work, "", bytes_read)


def _memory_row(operation: str, tasks: str, total: float, queue: str, size: float) -> str:
    return _row(operation, tasks, f"{total:.1f}", queue, f"{size / 1e6:.1f}", f"{size / total / 1e6:.2f}")


def _rows(times: list[OperationTime]) -> Iterator[str]:
    for time in times:
        parts = (time.total, time.queue, time.inputs, time.working)
        yield _row(time.operation, f"{time.tasks:.1f}", *(f"{part:.1f}" for part in parts))


def _row(first: str, *others: str) -> str:
    return f"{first:16}" + "".join(f"{other:>10}" for other in others)
