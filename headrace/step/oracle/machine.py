"""The oracle: a machine that runs a plan on the CPU, task by task, and watches every access.

It knows the step from the plan's descriptors only. An SM's loader and consumer are agents of their own, as
they are on the device, and take turns in an order that may be any that the counters allow (`order`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.model.kv import KVCache
from headrace.model.sampler import Sampled
from headrace.step.isa import TILE_ROWS, Buffer, Field
from headrace.step.machine import TASK_SLOTS
from headrace.step.oracle.arithmetic import Floats, Rounding
from headrace.step.oracle.clocks import Clock, Clocks, Counter, Target
from headrace.step.oracle.core import Core, Launch, Machine, Task
from headrace.step.oracle.errors import StuckError
from headrace.step.oracle.memory import Array, Exchange, KVPages, Regions
from headrace.step.oracle.order import Order, PlannerOrder
from headrace.step.oracle.rows import LaunchRow, RowStates
from headrace.step.oracle.twins import TWINS
from headrace.step.oracle.weights import WeightPages
from headrace.step.plan import Plan


@dataclass(slots=True)
class Handover:
    """A task that a loader has handed to its consumer, with what it found out and knew."""

    task: int
    epoch: int
    loaded: Any
    snapshot: Clock


@dataclass(slots=True)
class Streaming:
    """How far an SM is in its list: the loader's next task, and the tasks handed over."""

    core: Core
    tasks: int
    epoch: int
    next: int = 0
    queue: deque[Handover] = field(default_factory=deque)


class Oracle:
    """Runs the steps of `plan` over `weights` and the KV pages of `cache`, launch after launch.

    `rounding` FLOAT32 needs weights and a cache of float32, BFLOAT16 goes with either. Raises HazardError or
    StuckError, while a launch is iterated over, for a plan that is wrong.
    """

    def __init__(
        self,
        plan: Plan,
        weights: WeightPages,
        cache: KVCache,
        *,
        rounding: Rounding,
        order: Order | None = None,
    ) -> None:
        self.plan = plan
        self.order: Order = order or PlannerOrder()
        self._clocks = Clocks(plan.sizes.sms)
        self._counters = [Counter() for _ in plan.counters]
        self._epoch = 0
        self._tasks = [[tuple(words.tolist()) for words in plan.tasks(sm)] for sm in range(plan.sizes.sms)]
        self._machine = Machine(
            sizes=plan.sizes,
            rounding=rounding,
            weights=weights,
            exchange=Exchange(plan.sizes, self._clocks),
            kv=KVPages(cache, self._clocks),
            row_state=Regions(Buffer.ROW_STATE.name, (plan.sizes.sms,), self._clocks),
            frequencies=Machine.rotary(plan.config),
        )
        self._sms: list[Streaming] = []

    def launch(
        self,
        rows: Sequence[LaunchRow | None],
        steps: int = 1,
        stop: Callable[[], bool] = lambda: False,
    ) -> Generator[list[Sampled | None]]:
        """Up to `steps` steps, one item each: what every row made, None for a row that is absent or ended.

        Ends early when no row is active, or at the end of a step in which `stop` was seen. Closing it early
        ends the launch in the same way. Raises ValueError for rows that the plan cannot take.
        """
        self._check(rows, steps)
        launch = Launch(last=self._epoch + steps, stop=stop)
        self._begin(rows)
        told = 0
        agents = self.order.turns(self.plan.sizes.sms)
        try:
            while self._run(launch, agents, until=told + 1):
                yield launch.ring[told][: len(rows)]
                told += 1
        except GeneratorExit:  # nobody wants the rest: end as a stop flag would
            launch.stop = lambda: True
            self._run(launch, agents, until=steps + 1)
            raise
        finally:
            self._epoch += len(launch.ring)

    def _run(self, launch: Launch, agents: Iterator[int], until: int) -> bool:
        """Deal out turns until the ring holds `until` steps; False if the launch ends before."""
        idle = 0
        while len(launch.ring) < until:
            if all(streaming.core.finished for streaming in self._sms):
                return False
            idle = 0 if self._turn(next(agents), launch) else idle + 1
            if idle > 2 * self._clocks.agents:
                raise StuckError(self._explain())
        return True

    def buffer(self, buffer: Buffer) -> Array:
        """An exchange buffer as it is now, for comparisons."""
        return self._machine.exchange.values[buffer]

    def logits(self) -> Floats:
        """LOGITS of all SMs after a launch's last step: [R, vocabulary]."""
        sizes = self.plan.sizes
        whole = np.full((sizes.vocabulary_tiles, sizes.rows, TILE_ROWS), np.nan, dtype=np.float32)
        for streaming in self._sms:
            if (held := streaming.core.logits) is not None:
                whole[held.first : held.first + len(held.values)] = held.values
        return whole.swapaxes(0, 1).reshape(sizes.rows, -1)[:, : sizes.vocabulary]

    def _check(self, rows: Sequence[LaunchRow | None], steps: int) -> None:
        present = [row for row in rows if row is not None]
        if not present or len(rows) > self.plan.sizes.rows or steps < 1:
            raise ValueError(
                f"a launch takes 1 to {self.plan.sizes.rows} rows and at least 1 step, "
                f"not {len(present)} of {len(rows)} rows and {steps} steps"
            )
        if steps > 1 and len({row.slot for row in present}) < len(present):
            raise ValueError("several rows of one slot take one step a launch: the host decides what follows")

    def _begin(self, rows: Sequence[LaunchRow | None]) -> None:
        self._clocks.synchronize()
        self._machine.kv.begin_launch()
        for counter in self._counters:
            counter.settle()
        self._sms = [
            Streaming(Core(sm, RowStates.of(rows, self.plan.sizes.rows)), len(tasks), self._epoch + 1)
            for sm, tasks in enumerate(self._tasks)
        ]

    def _turn(self, agent: int, launch: Launch) -> bool:
        """Let an agent go on; False if it cannot."""
        act = self._consume if agent % 2 else self._load
        done = 0
        for _ in range(self.order.burst(agent)):
            if not act(agent, launch):
                break
            done += 1
        return done > 0

    def _task(self, agent: int, number: int, epoch: int, launch: Launch) -> Task:
        core = self._sms[agent // 2].core
        return Task(self._tasks[core.sm][number], self._machine, core, launch, agent, epoch)

    def _load(self, agent: int, launch: Launch) -> bool:
        """The loader's next task: wait, find out what depends on data, hand over."""
        streaming = self._sms[agent // 2]
        if streaming.core.finished or streaming.epoch > launch.last or len(streaming.queue) >= TASK_SLOTS:
            return False
        task = self._task(agent, streaming.next, streaming.epoch, launch)
        if not self._pass(agent, loader_waits(task)):
            return False
        loaded = TWINS[task.opcode].load(task)
        snapshot = self._clocks.release(agent)
        streaming.queue.append(Handover(streaming.next, streaming.epoch, loaded, snapshot))
        streaming.next += 1
        if streaming.next == streaming.tasks:
            streaming.next = 0
            streaming.epoch += 1
        return True

    def _consume(self, agent: int, launch: Launch) -> bool:
        """The consumer's next task: take it over, wait, compute, publish, signal."""
        streaming = self._sms[agent // 2]
        if streaming.core.finished or not streaming.queue:
            return False
        given = streaming.queue[0]
        task = self._task(agent, given.task, given.epoch, launch)
        twin = TWINS[task.opcode]
        self._clocks.acquire(agent, given.snapshot)
        if not self._pass(agent, twin.waits(task, given.loaded)):
            return False
        streaming.queue.popleft()
        twin.run(task, given.loaded)
        if task[Field.SIGNAL_COUNTER]:
            snapshot = self._clocks.release(agent)
            self._counters[task[Field.SIGNAL_COUNTER]].add(task[Field.SIGNAL_AMOUNT], snapshot)
        return True

    def _pass(self, agent: int, targets: list[Target]) -> bool:
        """Whether all counters are there; then the agent knows what their signallers knew."""
        if any(self._counters[target.counter].value < target.value for target in targets):
            return False
        for target in targets:
            snapshot = self._counters[target.counter].evidence(target.value)
            if snapshot is not None:
                self._clocks.acquire(agent, snapshot)
        return True

    def _explain(self) -> str:
        """Where every agent stands that still has something to do."""
        lines = ["no SM can go on:"]
        for streaming in self._sms:
            if streaming.core.finished:
                continue
            sm = streaming.core.sm
            launch = Launch(0, lambda: False)
            if streaming.queue:
                given = streaming.queue[0]
                task = self._task(2 * sm + 1, given.task, given.epoch, launch)
                lines.append(self._waiting(task, TWINS[task.opcode].waits(task, given.loaded)))
            else:
                task = self._task(2 * sm, streaming.next, streaming.epoch, launch)
                lines.append(self._waiting(task, loader_waits(task)))
        return "\n".join(lines)

    def _waiting(self, task: Task, targets: list[Target]) -> str:
        missing = [
            f"{self.plan.counters[target.counter]} to be {target.value}, which is {value}"
            for target in targets
            if (value := self._counters[target.counter].value) < target.value
        ]
        return f"  {task} waits for {' and '.join(missing) or 'its turn'}"


def loader_waits(task: Task) -> list[Target]:
    """The loader's wait of a descriptor, if it has one."""
    if not task[Field.LOADER_COUNTER]:
        return []
    epoch = task.epoch - task[Field.LOADER_LAG]
    return [Target(task[Field.LOADER_COUNTER], epoch * task[Field.LOADER_ARRIVALS])]
