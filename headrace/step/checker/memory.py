"""The last uses of every region of memory, and whether a new use comes safely after them.

An agent's events are numbered. Vector clocks say what an agent knows of: `knows[a, b]` is the last event of
agent b that is certain to have happened before what agent a does next (Lamport, 1978; Mattern, 1989). Two
uses of a region are in order exactly if the later one's agent knows of the earlier one. Agents 0 .. SMs - 1
are the consumers, the others the loaders.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.step.checker.accesses import Region
from headrace.step.checker.faults import Check
from headrace.step.isa import Buffer

Ints = npt.NDArray[np.int64]
Clocks = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Finding = tuple[Bools, Check, str]  # for which of the agents something is wrong, and what


@dataclass(frozen=True, slots=True)
class Event:
    """One event each of several agents: `who` [n], their numbers `now` [n], what they know [n, agents]."""

    who: Ints
    now: Clocks
    knows: Clocks


@dataclass(frozen=True, slots=True)
class Version:
    """What the tasks of one kind write in one step; complete when `tasks` of them have."""

    writer: str
    step: int
    tasks: int


@dataclass
class Uses:
    """Of one region, by agent: the last write of the current version, and the last of all other uses."""

    writes: Clocks
    others: Clocks
    version: Version | None = None
    written: int = 0


class Memory:
    """All memory of a walk through a plan on `sms` SMs."""

    def __init__(self, sms: int) -> None:
        self.sms = sms
        self._uses: dict[Region, Uses] = defaultdict(lambda: Uses(self._never(), self._never()))
        self._keys: dict[tuple[int, int], Clocks] = defaultdict(self._never)
        self._committed = np.zeros(sms, dtype=np.int32)

    def _never(self) -> Clocks:
        return np.zeros(2 * self.sms, dtype=np.int32)

    def read(self, region: Region, event: Event) -> Finding:
        """Agents read a region."""
        uses = self._uses[region]
        late = ignorant(event, uses.writes)
        if uses.version is None:
            late[:], why = True, "which nothing has written"
        elif uses.written < uses.version.tasks:
            late[:], why = True, f"while {uses.version.writer} writes it"
        else:
            why = f"not knowing that {uses.version.writer} has written it"
        uses.others[event.who] = np.maximum(uses.others[event.who], event.now)
        return late, Check.EARLY_READ, f"reads {named(region)}, {why}"

    def write(self, region: Region, event: Event, version: Version) -> Finding:
        """Agents write their parts of a version."""
        uses = self._uses[region]
        if uses.version != version:
            uses.others = np.maximum(uses.others, uses.writes)
            uses.writes = self._never()
            uses.version, uses.written = version, 0
        early = ignorant(event, uses.others)
        agent = int(np.argmax((event.knows < uses.others).any(axis=0)))
        uses.writes[event.who] = np.maximum(uses.writes[event.who], event.now)
        uses.written += len(event.who)
        whose = f"SM {agent % self.sms}'s {'consumers' if agent < self.sms else 'loader'}"
        return early, Check.OVERWRITE, f"writes {named(region)} while {whose} may still use what was there"

    def append_keys(self, layer: int, step: int, event: Event) -> None:
        """Agents write keys and values of this step's rows into KV pages, each to a place of its own."""
        written = self._keys[layer, step]
        written[event.who] = np.maximum(written[event.who], event.now)

    def read_keys(self, layer: int, step: int, event: Event) -> Finding:
        """Agents read KV pages up to what was written in `step`; later writes do not matter to them."""
        late = ignorant(event, self._keys[layer, step])
        return late, Check.EARLY_READ, "reads KV_PAGES that the step before may still write"

    def read_rows(self, sms: Ints, event: Event) -> Finding:
        """Loaders read their SMs' copies of ROW_STATE."""
        late = event.knows[np.arange(len(sms)), sms] < self._committed[sms]
        return late, Check.EARLY_READ, "reads ROW_STATE before the step before has committed it"

    def commit_rows(self, sms: Ints, event: Event) -> None:
        """Consumers write their SMs' copies of ROW_STATE.

        What their loaders have read for the tasks before is no longer in use: they handed those over. If one
        reads too soon for a task after, that is found by `read_rows`.
        """
        self._committed[sms] = event.now


def ignorant(event: Event, uses: Clocks) -> Bools:
    """Which of the agents [n] do not know of all these uses [agents]."""
    return np.asarray((event.knows < uses).any(axis=1), dtype=np.bool_)


def named(region: Region) -> str:
    """A region as people call it."""
    buffer, part = region
    parts = buffer in (Buffer.QKV, Buffer.HISTOGRAM, Buffer.TIES)
    return f"{buffer.name}[{part}]" if parts else buffer.name
