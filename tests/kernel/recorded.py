"""A launch as its trace would have it, made up: what is put in is what must come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.kernel.records import TRACE_ANCHOR, TRACE_LANES, TRACE_LINE
from headrace.kernel.trace import Lane, trace_bytes
from headrace.step.isa import Field, Opcode
from headrace.step.plan import Plan

GIGAHERTZ = 1.5  # of every SM's clock
HELPED = (Opcode.EXPERT_UP, Opcode.ATTENTION_MERGE)  # what helpers have a part in


class Recording:
    """The memory that a launch wrote, line by line, in microseconds. No two SMs' clocks agree."""

    def __init__(self, plan: Plan, steps: int, length: float = 1000.0) -> None:
        self.plan, self.steps = plan, steps
        sms, self.tasks = plan.sizes.sms, plan.descriptors.shape[1]
        self.memory = np.zeros(trace_bytes(plan, steps), dtype=np.uint8)
        anchors = self.memory[: sms * 2 * TRACE_ANCHOR.itemsize].view(TRACE_ANCHOR).reshape(sms, 2)
        self.lines = (
            self.memory[anchors.nbytes :].view(TRACE_LINE).reshape(sms, TRACE_LANES, steps * self.tasks)
        )
        self.signals = [0] * sms
        # Clocks that are anywhere, SM 1's about to overflow.
        self.clocks = [(2**32 - 1000 if sm == 1 else 12345 * sm) for sm in range(sms)]
        for sm in range(sms):
            for which, at in enumerate((0.0, length)):
                anchors[sm, which] = (int(5e9 + at * 1e3), self.cycles(sm, at), 0)

    def cycles(self, sm: int, microseconds: float) -> int:
        """The SM's clock at a moment."""
        ahead = self.drift(sm, microseconds)
        return (self.clocks[sm] + round((microseconds + ahead) * 1e3 * GIGAHERTZ)) % 2**32

    def drift(self, sm: int, microseconds: float) -> float:
        """How far an SM's clock is ahead between the anchors, where all are right."""
        return 0

    def task(
        self,
        lane: Lane,
        sm: int,
        step: int,
        task: int,
        moments: Sequence[float],
        inputs: float = 0,
    ) -> None:
        """One line of any but the publisher: ready, taken, seen, end; the wait for inputs."""
        clocks = [self.cycles(sm, moment) for moment in moments]
        waited = round(inputs * 1e3 * GIGAHERTZ)
        self.lines[sm, lane, step * self.tasks + task] = (*clocks, waited, step, task, 0)

    def signal(self, sm: int, counter: int, taken: float, end: float) -> None:
        """The publisher's next line."""
        line = self.lines[sm, Lane.PUBLISHER, self.signals[sm]]
        line["taken"], line["end"], line["task"] = self.cycles(sm, taken), self.cycles(sm, end), counter
        self.signals[sm] += 1


def everything(
    plan: Plan, steps: int, make: Callable[[Plan, int, float], Recording] = Recording
) -> npt.NDArray[np.uint8]:
    """A launch whose tasks take 1 us each, 0.25 of it waiting: the same tasks on all SMs at once."""
    places = places_of(plan)
    length = max(places.values()) + 1
    recording = make(plan, steps, 2.0 * steps * length)
    for sm in range(plan.sizes.sms):
        for step in range(steps):
            for task, words in enumerate(plan.tasks(sm)):
                now = 1.0 + step * length + places[_key(words)]
                recording.task(Lane.CONSUMERS, sm, step, task, (now, now + 0.1, now + 0.35, now + 1.0), 0.25)
                recording.task(Lane.COPIER, sm, step, task, (now - 1, now - 0.9, now - 0.9, now - 0.5))
                recording.task(Lane.LOADER, sm, step, task, (now - 1.2, now - 1.2, now - 1.1, now - 1), 0.1)
                if words[Field.OPCODE] in HELPED:
                    recording.task(Lane.HELPER, sm, step, task, (now - 2, now - 2, now - 1.7, now - 1.5), 0.3)
                if counter := int(words[Field.SIGNAL_COUNTER]):
                    recording.signal(sm, counter, now + 1.0, now + 1.1)
    return recording.memory


def places_of(plan: Plan) -> dict[tuple[int, ...], int]:
    """When in a step each operation is, so that on every SM they come one after another."""
    places: dict[tuple[int, ...], int] = {}
    before: dict[tuple[int, ...], int] | None = None
    while before != places:
        before = dict(places)
        for sm in range(plan.sizes.sms):
            earliest = 0
            for words in plan.tasks(sm):
                places[_key(words)] = max(places.get(_key(words), 0), earliest)
                earliest = places[_key(words)] + 1
    return places


def _key(words: npt.NDArray[np.int32]) -> tuple[int, ...]:
    return tuple(int(words[field]) for field in (Field.OPCODE, Field.LAYER, Field.KV_HEAD, Field.ROUND))
