"""What the kernel's watchdog saw, in words."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from headrace.step.plan import Plan
from headrace.step.text import describe


class Agent(IntEnum):
    """As in wait.h."""

    LOADER = 0
    CONSUMER = 1
    COPIER = 2
    HELPER = 3


class Waited(IntEnum):
    """As in wait.h: what a wait was for, and what its index counts."""

    COUNTER = 0
    PAGE_LANDED = 1
    PAGE_FREE = 2
    TASK = 3
    TASK_FREE = 4
    MESSAGE_FREE = 5
    SUMS_FULL = 6
    SUMS_EMPTY = 7
    ROUTE = 8


_WORDS = {
    Waited.PAGE_LANDED: "page {} of the ring to land",
    Waited.PAGE_FREE: "page {} of the ring to be read",
    Waited.TASK: "a task in slot {}",
    Waited.TASK_FREE: "task slot {} to be free",
    Waited.MESSAGE_FREE: "message slot {} to be free",
    Waited.SUMS_FULL: "all warps' parts of a tile in buffer {}",
    Waited.SUMS_EMPTY: "buffer {} of warps' parts to be read",
    Waited.ROUTE: "choice {} of experts",
}


def explain(plan: Plan, link: Any) -> str:
    """One line for a HOST_LINK record: who waited, at which task of which layer, and for what."""
    sm, task = int(link["sm"]), int(link["task"])
    agent, waited = Agent(int(link["agent"])), Waited(int(link["waited"]))
    if 0 <= task < plan.descriptors.shape[1]:
        where = describe(plan.descriptors[sm, task], plan.counters)
    else:
        where = "an unknown task"
    if waited is Waited.COUNTER:
        name = plan.counters[int(link["index"])]
        what = f"{name} to be {int(link['want']) % 2**32}, which is {int(link['have']) % 2**32}"
    else:
        what = _WORDS[waited].format(int(link["index"]))
    who = f"{agent.name.lower()} of SM {sm}"
    return f"the decode kernel gave up: {who} waited for {what} at task {task}: {where}"
