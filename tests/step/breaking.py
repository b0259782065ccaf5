"""Ways to break a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.model.presets import SMOLLM2_135M
from headrace.step.checker import Fault, check
from headrace.step.isa import Field, Opcode
from headrace.step.plan import Plan, Words
from headrace.step.planner import build_plan
from tests.step.configs import TINY

SMS = 5
PLAN = build_plan(TINY, rows=2, sms=SMS)
LLAMA = build_plan(replace(SMOLLM2_135M, layers=SMOLLM2_135M.layers[:2]), rows=1, sms=4)


def where(
    words: Words, opcode: Opcode, layer: int | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The places [SM, task] of an operation."""
    chosen = words[:, :, Field.OPCODE] == opcode
    if layer is not None:
        chosen &= words[:, :, Field.LAYER] == layer
    sms, tasks = np.nonzero(chosen)
    return sms, tasks


def broken(change: Callable[[Words], None], plan: Plan = PLAN) -> list[Fault]:
    """What the checker says of a plan whose descriptors were changed."""
    words = plan.descriptors.copy()
    change(words)
    assert (words != plan.descriptors).any(), "the change changed nothing"
    return check(replace(plan, descriptors=words))


def assign(
    operation: Opcode, layer: int | None, /, *, one: bool = True, **values: int
) -> Callable[[Words], None]:
    """Set fields of an operation: on the first SM that has it, or on all."""

    def change(words: Words) -> None:
        sms, tasks = where(words, operation, layer)
        for name, value in values.items():
            words[sms[: 1 if one else None], tasks[: 1 if one else None], Field[name.upper()]] = value

    return change


def shift(opcode: Opcode, layer: int | None, field: Field, by: int) -> Callable[[Words], None]:
    """Add to one field of an operation on the first SM that has it."""

    def change(words: Words) -> None:
        sms, tasks = where(words, opcode, layer)
        words[sms[0], tasks[0], field] += by

    return change


def swap(first: Opcode, second: Opcode, layer: int) -> Callable[[Words], None]:
    """Exchange two tasks of a layer on the first SM that has both."""

    def change(words: Words) -> None:
        firsts = dict(zip(*where(words, first, layer), strict=True))
        seconds = dict(zip(*where(words, second, layer), strict=True))
        sm = min(firsts.keys() & seconds.keys())
        a, b = firsts[sm], seconds[sm]
        words[sm, [a, b]] = words[sm, [b, a]]

    return change


def exchange(opcode: Opcode, layer: int) -> Callable[[Words], None]:
    """Exchange the tasks that two SMs have for one operation."""

    def change(words: Words) -> None:
        sms, tasks = where(words, opcode, layer)
        words[sms[:2], tasks[:2]] = words[sms[1::-1], tasks[1::-1]]

    return change


def unwaited(*opcodes: Opcode, layer: int | None = None) -> Callable[[Words], None]:
    """Take the consumers' waits from operations, in one layer or in all."""
    fields = (Field.WAIT_COUNTER, Field.WAIT_ARRIVALS, Field.SECOND_COUNTER, Field.SECOND_ARRIVALS)

    def change(words: Words) -> None:
        for opcode in opcodes:
            for field in fields:
                words[(*where(words, opcode, layer), field)] = 0

    return change


def drop(opcode: Opcode, layer: int | None = None) -> Callable[[Words], None]:
    """Remove an operation from every SM."""

    def change(words: Words) -> None:
        for sm, task in reversed(list(zip(*where(words, opcode, layer), strict=True))):
            words[sm, task:-1] = words[sm, task + 1 :]

    return change


def counter(name: str, plan: Plan = PLAN) -> int:
    return plan.counters.index(name)
