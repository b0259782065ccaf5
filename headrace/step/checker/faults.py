"""What is wrong with a plan, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.step.isa import Opcode


class Check(StrEnum):
    """The kinds of faults, each with what it would do on a device."""

    FIELDS = "fields"  # a descriptor that no interpreter understands
    TARGETS = "targets"  # a wait that passes early, or late
    COVERAGE = "coverage"  # an output that is missing, or written twice
    PAGES = "pages"  # the wrong weights, or a loader and consumers that count differently
    SETTINGS = "settings"  # another model than the config describes
    BUDGET = "budget"  # more memory or registers than an SM has
    UNREACHABLE = "unreachable"  # a wait that no number of steps meets
    CYCLE = "cycle"  # tasks that wait for one another
    EARLY_READ = "early read"  # data read before its writer is known to be done
    OVERWRITE = "overwrite"  # data written while another task may still use what was there


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `sm` is the first at fault; `counter` is a name, and empty where none is involved."""

    check: Check
    message: str
    opcode: Opcode | None = None
    layer: int | None = None
    sm: int | None = None
    counter: str = ""

    def __str__(self) -> str:
        where = [] if self.opcode is None else [self.opcode.name]
        where += [] if self.layer is None else [f"layer {self.layer}"]
        where += [] if self.sm is None else [f"SM {self.sm}"]
        place = f"{', '.join(where)}: " if where else ""
        return f"{self.check}: {place}{self.message}"
