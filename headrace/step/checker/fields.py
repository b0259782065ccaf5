"""Are the descriptors well formed?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Group, Table
from headrace.step.isa import FIELDS, USED, WORDS, Field, Opcode

_COUNTERS = (Field.WAIT_COUNTER, Field.SECOND_COUNTER, Field.LOADER_COUNTER, Field.SIGNAL_COUNTER)


def check_fields(table: Table) -> list[Fault]:
    """Opcodes exist, fields in use are in range, others are 0, and nothing follows END."""
    return [*_opcodes(table), *_ends(table)] or [fault for opcode in USED for fault in _ranges(table, opcode)]


def _opcodes(table: Table) -> Iterator[Fault]:
    known = np.isin(table.words[:, Field.OPCODE], [opcode.value for opcode in Opcode])
    for index in np.flatnonzero(~known)[:1]:
        number = table.words[index, Field.OPCODE]
        yield Fault(Check.FIELDS, f"there is no operation {number}", sm=int(table.sms[index]))


def _ends(table: Table) -> Iterator[Fault]:
    descriptors = table.plan.descriptors
    ended = np.logical_or.accumulate(descriptors[:, :, Field.OPCODE] == Opcode.END, axis=1)
    for sm in np.flatnonzero(~ended[:, -1])[:1]:
        yield Fault(Check.FIELDS, "the list does not end in END", sm=int(sm))
    for sm in np.flatnonzero((descriptors.any(axis=2) & ended).any(axis=1))[:1]:
        yield Fault(Check.FIELDS, "the list goes on after END", sm=int(sm))


def _ranges(table: Table, opcode: Opcode) -> Iterator[Fault]:
    chosen = table.words[:, Field.OPCODE] == opcode
    group = Group(opcode, None, table.words[chosen], table.sms[chosen])
    used = {Field.OPCODE, *USED[opcode]}
    counters = len(table.plan.counters)
    for field in map(Field, range(WORDS)):
        values, info = group[field], FIELDS[field]
        high = counters - 1 if field in _COUNTERS else info.high
        low, high = (info.low, high) if field in used else (0, 0)
        wrong = (values < low) | (values > high)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            what = f"{low} to {high}" if field in used else "0: this operation does not use it"
            yield Fault(
                Check.FIELDS,
                f"{field.name} ({info.meaning}) is {values[at]}, and must be {what}",
                opcode,
                int(group.words[at, Field.LAYER]) if Field.LAYER in used else None,
                int(group.sms[at]),
            )
