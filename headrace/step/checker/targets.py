"""Does every wait ask for exactly what a step adds to its counter?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.table import Ints, Table
from headrace.step.isa import USED, Buffer, Field, Opcode

_WAITS = (
    (Field.WAIT_COUNTER, Field.WAIT_ARRIVALS),
    (Field.SECOND_COUNTER, Field.SECOND_ARRIVALS),
    (Field.LOADER_COUNTER, Field.LOADER_ARRIVALS),
)


def arrivals(table: Table) -> Ints:
    """What one step adds to every counter, [counters]."""
    out = np.zeros(len(table.plan.counters), dtype=np.int64)
    np.add.at(out, table.words[:, Field.SIGNAL_COUNTER], table.words[:, Field.SIGNAL_AMOUNT])
    return out


def check_targets(table: Table) -> list[Fault]:
    """Targets equal arrivals; amounts are what the operation's contract says; counters have one meaning."""
    added = arrivals(table)
    faults = [fault for fields in _WAITS for fault in _waits(table, added, *fields)]
    return [*faults, *_spans(table), *_amounts(table), *_publications(table), *_meanings(table)]


def _waits(table: Table, added: Ints, counter: Field, target: Field) -> Iterator[Fault]:
    words = table.words
    for index in np.flatnonzero((words[:, counter] == 0) & (words[:, target] != 0))[:1]:
        task = words[index]
        message = f"{target.name} is {task[target]} without a counter"
        opcode, layer, sm = Opcode(task[Field.OPCODE]), int(task[Field.LAYER]), int(table.sms[index])
        yield Fault(Check.TARGETS, message, opcode, layer, sm)
    spans = np.where(counter == Field.WAIT_COUNTER, np.maximum(words[:, Field.WAIT_SPAN], 1), 1)
    for offset in range(int(spans.max(initial=1))):
        waits = np.flatnonzero((words[:, counter] > 0) & (spans > offset))
        ids = words[waits, counter] + offset
        inside = ids < len(added)
        have = np.where(inside, added[np.minimum(ids, len(added) - 1)], 0)
        wrong = have != words[waits, target]
        seen: set[int] = set()
        for index in np.flatnonzero(wrong):
            if int(ids[index]) in seen:
                continue
            seen.add(int(ids[index]))
            task = words[waits[index]]
            name = table.plan.counters[ids[index]] if inside[index] else f"number {ids[index]}"
            yield Fault(
                Check.TARGETS,
                f"{counter.name} waits for {task[target]} arrivals a step at counter {name}, "
                f"to which a step adds {have[index]}",
                Opcode(task[Field.OPCODE]),
                int(task[Field.LAYER]),
                int(table.sms[waits[index]]),
                name,
            )


def _spans(table: Table) -> Iterator[Fault]:
    for group in table.groups(Opcode.ATTENTION):
        yield from group.unequal(
            Check.TARGETS, Field.WAIT_SPAN, table.plan.sizes.kv_heads, "one counter for each KV head"
        )


def _amounts(table: Table) -> Iterator[Fault]:
    """Tasks of tiles signal tiles, those with a share 1; a task without a counter signals nothing."""
    for opcode, used in USED.items():
        if Field.SIGNAL_AMOUNT not in used:
            continue
        for group in table.groups(opcode):
            amount = 1 if Field.SHARE in used else group[Field.TILE_COUNT]
            expected = np.where(group[Field.SIGNAL_COUNTER] > 0, amount, 0)
            yield from group.unequal(Check.TARGETS, Field.SIGNAL_AMOUNT, expected, "what the task finished")


def _publications(table: Table) -> Iterator[Fault]:
    """What adds to the residual signals exactly if it publishes the sum."""
    for opcode in (Opcode.O_PROJ, Opcode.EXPERT_DOWN, Opcode.FFN_DOWN):
        for group in table.groups(opcode):
            wrong = (group[Field.SIGNAL_COUNTER] > 0) != (group[Field.OUTPUT] == Buffer.X)
            if wrong.any():
                yield group.fault(Check.TARGETS, "it must signal if it writes X, and not otherwise", wrong)


def _meanings(table: Table) -> Iterator[Fault]:
    """A counter that two kinds of outputs share would pass when only one of them is there."""
    signals = np.flatnonzero(table.words[:, Field.SIGNAL_COUNTER] > 0)
    words = table.words[signals]
    columns = [Field.SIGNAL_COUNTER, Field.OPCODE, Field.LAYER, Field.ROUND, Field.KV_HEAD, Field.OUTPUT]
    kinds, first = np.unique(words[:, columns], axis=0, return_index=True)
    counters, counts = np.unique(kinds[:, 0], return_counts=True)
    for counter in counters[counts > 1]:
        task = words[first[kinds[:, 0] == counter][-1]]
        name = table.plan.counters[counter]
        yield Fault(
            Check.TARGETS,
            f"counter {name} is signalled for more than one output",
            Opcode(task[Field.OPCODE]),
            int(task[Field.LAYER]),
            int(table.sms[signals[first[kinds[:, 0] == counter][-1]]]),
            name,
        )
