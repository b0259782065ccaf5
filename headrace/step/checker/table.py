"""All tasks of a plan as one table, and the tasks that make one output together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.step.checker.faults import Check, Fault
from headrace.step.isa import USED, Field, Opcode
from headrace.step.plan import Plan, Words

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """The tasks of one operation in one layer, and of one value of another field where asked for."""

    opcode: Opcode
    layer: int | None
    words: Words  # [tasks, WORDS]
    sms: Ints  # [tasks]

    def __getitem__(self, field: Field) -> Ints:
        return self.words[:, field].astype(np.int64)

    def fault(self, check: Check, message: str, wrong: npt.NDArray[np.bool_] | None = None) -> Fault:
        """A fault of this group; `wrong` [tasks] marks the tasks at fault."""
        first = None if wrong is None else int(self.sms[np.flatnonzero(wrong)[0]])
        return Fault(check, message, self.opcode, self.layer, first)

    def unequal(self, check: Check, field: Field, expected: Ints | int, why: str) -> Iterator[Fault]:
        """A fault for each field that is not what it should be."""
        wrong = self[field] != expected
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            wanted = int(np.broadcast_to(expected, wrong.shape)[at])
            have = int(self[field][at])
            yield self.fault(check, f"{field.name} is {have} and should be {wanted}: {why}", wrong)


class Table:
    """`words` [tasks, WORDS] and the SM of each task [tasks], SM after SM."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        present = plan.descriptors[:, :, Field.OPCODE] != Opcode.END
        self.sms: Ints = np.nonzero(present)[0]
        self.words: Words = plan.descriptors[present]

    def groups(self, opcode: Opcode, by: Field | None = None) -> Iterator[Group]:
        """The tasks of an operation, layer by layer, and told apart by one more field where `by` is given."""
        of_opcode = np.flatnonzero(self.words[:, Field.OPCODE] == opcode)
        layered = Field.LAYER in USED[opcode]
        keys = self.words[of_opcode][:, [Field.LAYER] if by is None else [Field.LAYER, by]]
        for key in np.unique(keys, axis=0):
            chosen = of_opcode[(keys == key).all(axis=1)]
            yield Group(opcode, int(key[0]) if layered else None, self.words[chosen], self.sms[chosen])
