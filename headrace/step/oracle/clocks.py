"""Who knows of what: vector clocks of the agents, and counters that carry them.

Every SM has two agents, a loader and a consumer. An agent's clock counts its releases: signals, and tasks
handed from loader to consumer. `knowledge[a, b]` is the last clock of agent b whose writes agent a may rely
on (Lamport, 1978; Mattern, 1989). Writes are tagged with (agent, clock); a reader may see a write only if
its knowledge has reached that clock.

A wait that passes teaches no more than it must: of all arrivals at a counter only the first ones, up to the
number that is waited for, are relied upon. So a target that is too small is found out in every order.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Clock = npt.NDArray[np.int32]


class Clocks:
    """Vector clocks of 2 * sms agents."""

    def __init__(self, sms: int) -> None:
        self.agents = 2 * sms
        self.host = self.agents  # stands for whoever wrote before a launch; that is known to all
        self.knowledge = np.eye(self.agents, self.agents + 1, dtype=np.int32)
        self.knowledge[:, self.host] = np.iinfo(np.int32).max

    def known(self, agent: int) -> Clock:
        """The last clock of every agent that this one may rely on."""
        return np.asarray(self.knowledge[agent, : self.agents])

    def now(self, agent: int) -> int:
        """The clock that tags what the agent writes."""
        return int(self.knowledge[agent, agent])

    def release(self, agent: int) -> Clock:
        """What the agent knows, its own writes so far included; later writes get a later clock."""
        snapshot: Clock = self.knowledge[agent].copy()
        self.knowledge[agent, agent] += 1
        return snapshot

    def acquire(self, agent: int, snapshot: Clock) -> None:
        """Learn what another agent released."""
        np.maximum(self.knowledge[agent], snapshot, out=self.knowledge[agent])

    def synchronize(self) -> None:
        """Between launches everybody learns everything."""
        self.knowledge[:] = self.knowledge.max(axis=0)
        self.knowledge[np.diag_indices(self.agents)] += 1


@dataclass
class Counter:
    """A counter's arrivals in a launch: running totals, and what all up to each of them released."""

    base: int = 0
    totals: list[int] = field(default_factory=list)
    snapshots: list[Clock] = field(default_factory=list)

    @property
    def value(self) -> int:
        return self.totals[-1] if self.totals else self.base

    def add(self, amount: int, snapshot: Clock) -> None:
        """Count an arrival."""
        joined = np.maximum(self.snapshots[-1], snapshot) if self.snapshots else snapshot
        self.totals.append(self.value + amount)
        self.snapshots.append(joined)

    def evidence(self, target: int) -> Clock | None:
        """What the first arrivals that make up `target` released; None if a launch before this one did."""
        if target <= self.base:
            return None
        return self.snapshots[bisect_left(self.totals, target)]

    def settle(self) -> None:
        """Forget who arrived: the launch is over, and all know."""
        self.base = self.value
        self.totals.clear()
        self.snapshots.clear()


@dataclass(frozen=True, slots=True)
class Target:
    """A counter and the value that must be reached."""

    counter: int
    value: int
