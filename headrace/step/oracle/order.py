"""In which order the agents take their turns: any that the counters allow must give the same result."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol


class Order(Protocol):
    """Deals out turns. An agent whose turn it is does one task if it can; if none can, the plan is stuck."""

    def turns(self, sms: int) -> Iterator[int]:
        """Agents, without end: agent 2i is the loader of SM i, 2i + 1 its consumer."""

    def burst(self, agent: int) -> int:
        """How many tasks in a row the agent may do in its turn."""


class PlannerOrder:
    """Round and round over the SMs, a task each, the loader just ahead of the consumer."""

    def turns(self, sms: int) -> Iterator[int]:
        while True:
            yield from range(2 * sms)

    def burst(self, agent: int) -> int:
        return 1


class RandomOrder:
    """Any legal order: SMs, loaders and consumers run ahead of each other as far as they can, by chance."""

    def __init__(self, seed: int, longest: int = 24) -> None:
        self._random = random.Random(seed)
        self._longest = longest

    def turns(self, sms: int) -> Iterator[int]:
        agents = list(range(2 * sms))
        while True:
            self._random.shuffle(agents)
            yield from agents

    def burst(self, agent: int) -> int:
        return self._random.randint(1, self._longest)
