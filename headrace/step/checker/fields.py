"""Are the descriptors well formed?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Group, Table
from headrace.step.isa import FIELDS, USED, WORDS, Buffer, Field, Opcode

_COUNTERS = (Field.WAIT_COUNTER, Field.SECOND_COUNTER, Field.LOADER_COUNTER, Field.SIGNAL_COUNTER)
_SUMS = {Buffer.RESIDUAL, Buffer.X}

# What each operation may have as INPUT and as OUTPUT.
_BUFFERS: dict[Opcode, tuple[set[Buffer], set[Buffer]]] = {
    Opcode.EMBED: (set(), {Buffer.X}),
    Opcode.ROUTER: ({Buffer.X}, {Buffer.ROUTER_LOGITS}),
    Opcode.QKV_PROJ: ({Buffer.X}, {Buffer.QKV}),
    Opcode.ATTENTION: ({Buffer.QKV}, {Buffer.PARTIALS}),
    Opcode.ATTENTION_MERGE: ({Buffer.PARTIALS}, {Buffer.ATTENTION_OUT}),
    Opcode.O_PROJ: ({Buffer.ATTENTION_OUT}, _SUMS),
    Opcode.EXPERT_UP: ({Buffer.X}, {Buffer.HIDDEN}),
    Opcode.EXPERT_DOWN: ({Buffer.HIDDEN}, _SUMS),
    Opcode.FFN_UP: ({Buffer.X}, {Buffer.HIDDEN, Buffer.SHARED_HIDDEN}),
    Opcode.FFN_DOWN: ({Buffer.HIDDEN, Buffer.SHARED_HIDDEN}, _SUMS),
    Opcode.LM_HEAD: ({Buffer.X}, {Buffer.LOGITS}),
    Opcode.SAMPLE_STATS: ({Buffer.LOGITS}, {Buffer.STATS}),
    Opcode.SAMPLE_SELECT: ({Buffer.LOGITS}, {Buffer.HISTOGRAM, Buffer.TIES}),
    Opcode.SAMPLE_PICK: ({Buffer.LOGITS}, {Buffer.CANDIDATES}),
    Opcode.SAMPLE_COMMIT: ({Buffer.CANDIDATES}, {Buffer.ROW_STATE}),
}


def check_fields(table: Table) -> list[Fault]:
    """Opcodes exist, fields in use are in range, others are 0, and nothing follows END."""
    if faults := [*_opcodes(table), *_ends(table)]:
        return faults
    faults = [fault for opcode in USED for fault in _ranges(table, opcode)]
    return faults or [fault for opcode in _BUFFERS for fault in _flow(table, opcode)]


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
    highest = dict.fromkeys(_COUNTERS, len(table.plan.counters) - 1)
    highest |= {Field.LAYER: table.plan.sizes.layers - 1, Field.NORM: table.plan.sizes.norms - 1}
    for field in map(Field, range(WORDS)):
        values, info = group[field], FIELDS[field]
        low, high = (info.low, highest.get(field, info.high)) if field in used else (0, 0)
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


def _flow(table: Table, opcode: Opcode) -> Iterator[Fault]:
    """Inputs and outputs are buffers of the operation."""
    for field, allowed in zip((Field.INPUT, Field.OUTPUT), _BUFFERS[opcode], strict=True):
        if not allowed:
            continue
        for group in table.groups(opcode):
            wrong = ~np.isin(group[field], list(allowed))
            if wrong.any():
                have = Buffer(group[field][wrong][0]).name
                names = " or ".join(sorted(buffer.name for buffer in allowed))
                yield group.fault(Check.FIELDS, f"{field.name} is {have}, and must be {names}", wrong)
