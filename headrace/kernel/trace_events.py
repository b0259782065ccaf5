"""A trace for Perfetto (ui.perfetto.dev): a process for every SM, a thread for each of its lanes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TextIO

import numpy as np

from headrace.kernel.trace import Lane, Tasks, Trace
from headrace.step.isa import USED, Field, Opcode
from headrace.step.plan import Words
from headrace.step.text import describe

_LEAST = 0.02  # microseconds: shorter waits are not worth a slice

Event = dict[str, object]


def write_events(trace: Trace, file: TextIO, *, steps: Sequence[int], sms: Sequence[int]) -> None:
    """The steps and SMs that are asked for, as JSON in the Trace Event Format; times are microseconds."""
    file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
    for number, event in enumerate(_events(trace, steps, sms)):
        file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")


def _events(trace: Trace, steps: Sequence[int], sms: Sequence[int]) -> Iterator[Event]:
    for sm in sms:
        yield {"ph": "M", "pid": sm, "name": "process_name", "args": {"name": f"SM {sm}"}}
        yield {"ph": "M", "pid": sm, "name": "process_sort_index", "args": {"sort_index": sm}}
        for lane in Lane:
            yield {
                "ph": "M",
                "pid": sm,
                "tid": lane,
                "name": "thread_name",
                "args": {"name": lane.name.lower()},
            }
        for step in steps:
            yield from _lane(trace, Lane.COPIER, trace.copiers, sm, step)
            yield from _lane(trace, Lane.CONSUMERS, trace.consumers, sm, step)
            yield from _lane(trace, Lane.LOADER, trace.loaders, sm, step)
            yield from _lane(trace, Lane.HELPER, trace.helpers, sm, step)
        yield from _signals(trace, sm, steps)


def _lane(trace: Trace, lane: Lane, tasks: Tasks, sm: int, step: int) -> Iterator[Event]:
    """A slice for each task, and within it, at its beginning, one for its wait for counters."""
    for task, words in enumerate(trace.plan.tasks(sm)):
        at = (sm, step, task)
        if np.isnan(tasks.end[at]):
            continue
        if tasks.queue[at] > _LEAST:
            what = "no order" if lane is Lane.COPIER else "no task"
            yield _slice(sm, lane, what, tasks.ready[at], tasks.taken[at])
        arguments = {
            "step": step,
            "task": describe(words, trace.plan.counters),
            "inputs_us": _short(tasks.inputs[at]),
            "copying_us" if lane is Lane.COPIER else "working_us": _short(tasks.working[at]),
        }
        yield _slice(sm, lane, name_of(words), tasks.taken[at], tasks.end[at]) | {"args": arguments}
        if tasks.inputs[at] > _LEAST:
            yield _slice(sm, lane, _waited(trace, lane, words), tasks.taken[at], tasks.seen[at])


def _waited(trace: Trace, lane: Lane, words: Words) -> str:
    """What a task has waited for: of the loader's a counter of its own, or a choice; else a slot."""
    routes = words[Field.OPCODE] == Opcode.EXPERT_UP
    if lane is Lane.LOADER and routes:
        return "wait choice"
    of_loader = lane is Lane.LOADER or (lane is Lane.HELPER and routes)
    counter = words[Field.LOADER_COUNTER if of_loader else Field.WAIT_COUNTER]
    return f"wait {trace.plan.counters[int(counter)]}" if counter else "wait slot"


def _signals(trace: Trace, sm: int, steps: Sequence[int]) -> Iterator[Event]:
    signals = trace.signals
    for index in np.flatnonzero((signals.sm == sm) & np.isin(signals.step, steps)):
        name = trace.plan.counters[int(signals.counter[index])]
        yield _slice(sm, Lane.PUBLISHER, name, signals.taken[index], signals.end[index])


def name_of(words: Words) -> str:
    """Operation and layer."""
    opcode = Opcode(words[Field.OPCODE])
    return f"{opcode.name} {words[Field.LAYER]}" if Field.LAYER in USED[opcode] else opcode.name


def _slice(sm: int, lane: Lane, name: str, begin: float, end: float) -> Event:
    return {
        "ph": "X", "pid": sm, "tid": int(lane), "name": name, "ts": _short(begin), "dur": _short(end - begin)
    }  # fmt: skip


def _short(microseconds: float) -> float:
    return round(float(microseconds), 3)
