"""What the kernel backend takes itself and what it leaves to another. Its kernels only note their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.kernel_backend import KernelBackend, is_plain
from headrace.model.config import KVGroup
from headrace.model.constraint import Constraint
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams
from headrace.step.oracle.rows import LaunchRow

GREEDY = SamplingParams(temperature=0)


def row(params: SamplingParams = GREEDY, *, constraint: Constraint | None = None) -> DecodeRow:
    return DecodeRow(
        slot=3,
        token=7,
        position=2,
        tables={KVGroup.FULL: [5]},
        prompt=[1, 2],
        output=[7],
        params=params,
        seed=1,
        max_tokens=4,
        stop_token_ids=frozenset({9}),
        constraint=constraint,
    )


@dataclass
class Kernels:
    calls: list[tuple[int, list[LaunchRow | None], int]] = field(default_factory=list)
    prepared: bool = False

    def prepare(self) -> None:
        self.prepared = True

    def launcher(self, rows: int) -> Kernels:
        self.calls.append((rows, [], 0))
        return self

    def launch(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool]
    ) -> Iterator[list[int | None]]:
        self.calls[-1] = (self.calls[-1][0], list(rows), steps)
        for step in range(steps):
            yield [100 * step + index if index or not step else None for index in range(len(rows))]
            if stop():
                return


@dataclass
class Others:
    name: str = "others"
    max_rows: int = 16
    max_steps: int = 16
    takes_constraints: bool = True
    calls: int = 0

    def prepare(self) -> None: ...

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        self.calls += 1
        yield [Sampled(-1)] * len(rows)


def backend() -> tuple[KernelBackend, Kernels, Others]:
    kernels, others = Kernels(), Others()
    return KernelBackend(kernels, others, max_rows=16, max_steps=64), kernels, others


def test_greedy_rows_go_to_the_kernel_with_all_that_it_must_know() -> None:
    own, kernels, others = backend()
    own.prepare()
    assert kernels.prepared
    assert own.max_steps == 16
    assert own.takes_constraints
    made = list(own.run([row(), row()], 2, threading.Event()))
    assert made == [[Sampled(0), Sampled(1)], [None, Sampled(101)]]
    assert others.calls == 0
    ((count, rows, steps),) = kernels.calls
    assert (count, steps) == (2, 2)
    given = rows[0]
    assert given is not None
    assert (given.slot, given.token, given.position, given.max_tokens) == (3, 7, 2, 4)
    assert given.tables == {KVGroup.FULL: [5]}
    assert given.stop_token_ids == frozenset({9})


def test_an_interrupt_ends_the_call() -> None:
    own, _, _ = backend()
    interrupt = threading.Event()
    interrupt.set()
    assert len(list(own.run([row()], 16, interrupt))) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0, repetition_penalty=1.1),
        SamplingParams(temperature=0, logit_bias={3: 1.0}),
        SamplingParams(temperature=0, logprobs=0),
    ],
)
def test_a_row_that_the_kernel_cannot_sample_goes_to_the_other_backend(params: SamplingParams) -> None:
    own, kernels, others = backend()
    assert list(own.run([row(params)], 4, threading.Event())) == [[Sampled(-1)]]
    assert (others.calls, kernels.calls) == (1, [])


def test_rows_of_both_kinds_take_one_step_each_where_it_belongs() -> None:
    own, kernels, others = backend()
    drawn = row(SamplingParams(temperature=0.5))
    made = list(own.run([drawn, row(), drawn, row()], 4, threading.Event()))
    assert made == [[Sampled(-1), Sampled(0), Sampled(-1), Sampled(1)]]
    assert others.calls == 1
    ((count, rows, steps),) = kernels.calls
    assert (count, len(rows), steps) == (2, 2, 1)


def test_a_constraint_is_not_plain() -> None:
    constraint: Constraint = object()  # type: ignore[assignment]
    assert is_plain(row())
    assert not is_plain(row(constraint=constraint))
