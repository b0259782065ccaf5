"""A trace as a timeline for `headrace.step.draw`: what was recorded looks like what was predicted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.kernel.trace import Trace
from headrace.step.cost import Span, Timeline, Work
from headrace.step.isa import USED, Field, Opcode


def timeline_of(trace: Trace) -> Timeline:
    """The last step, and the one before for where it ends. Pages in the ring are not known.

    A bar of the consumers begins when a task's inputs are there: waits for pages are within it.
    """
    sms = trace.plan.sizes.sms
    none: list[list[float]] = [[] for _ in range(sms)]
    return Timeline(
        spans=[list(_spans(trace, sm)) for sm in range(sms)],
        ring_pages=trace.plan.machine.ring_pages,
        issues=none,
        landings=none,
        releases=none,
    )


def _spans(trace: Trace, sm: int) -> Iterator[Span]:
    consumers, copiers = trace.consumers, trace.copiers
    for step in range(max(trace.steps - 2, 0), trace.steps):
        for task, words in enumerate(trace.plan.tasks(sm)):
            at = (sm, step, task)
            if np.isnan(consumers.end[at]):
                continue
            opcode = Opcode(words[Field.OPCODE])
            loads = Field.PAGE_BYTES in USED[opcode] and opcode is not Opcode.EMBED
            yield Span(
                Work(opcode.name, int(words[Field.LAYER]), step, pages=int(loads), page_bytes=0),
                loading=(float(copiers.seen[at]), float(copiers.end[at])) if loads else (0.0, 0.0),
                waiting=float(consumers.taken[at]),
                begin=float(consumers.seen[at]),
                end=float(consumers.end[at]),
            )


def in_words(trace: Trace) -> str:
    """What stands below the picture's title."""
    return f"Recorded: {trace.step_time / 1e3:.3f} ms a step. Waits for pages are within the consumers' bars."
