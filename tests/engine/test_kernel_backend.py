"""What the kernel backend hands to a launch, and what it makes of it. Its kernels only note their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from headrace.engine.backend import DecodeRow
from headrace.engine.blocks import SequenceBlocks
from headrace.engine.kernel_backend import KernelBackend, launch_row
from headrace.engine.request import Request
from headrace.engine.sequence import Sequence
from headrace.engine.text import TextAssembler
from headrace.kernel.inputs import RowInputs
from headrace.kernel.records import ROW_INPUT, RowFlag
from headrace.model.config import KVGroup
from headrace.model.constraint import Constraint, Mask, mask_of
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams, TokenLogprobs
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
class Grammar:
    """Allows what it is given, anew for each token."""

    masks: list[Mask | None]

    def mask(self) -> Mask | None:
        return self.masks.pop(0)

    def accept(self, token: int) -> None: ...


def result(step: int, index: int) -> Sampled:
    token = 100 * step + index
    return Sampled(token, TokenLogprobs(token, -0.5, ((token, -0.5),)))


@dataclass
class Kernels:
    calls: list[tuple[int, list[LaunchRow | None], int]] = field(default_factory=list)
    prepared: bool = False
    rehearsed: bool = False

    def prepare(self) -> None:
        self.prepared = True

    def rehearse(self) -> None:
        self.rehearsed = True

    def launcher(self, rows: int) -> Kernels:
        self.calls.append((rows, [], 0))
        return self

    def run(
        self, rows: Seq[LaunchRow | None], steps: int, stop: Callable[[], bool]
    ) -> Iterator[list[Sampled | None]]:
        self.calls[-1] = (self.calls[-1][0], list(rows), steps)
        for step in range(steps):
            yield [result(step, index) if index or not step else None for index in range(len(rows))]
            if stop():
                return


def backend() -> tuple[KernelBackend, Kernels]:
    kernels = Kernels()
    return KernelBackend(kernels, max_rows=16, max_steps=64), kernels


def test_rows_of_all_kinds_go_to_the_kernel_with_all_that_it_must_know() -> None:
    own, kernels = backend()
    own.prepare()
    assert kernels.prepared
    assert own.max_steps == 16
    assert own.takes_constraints
    assert own.takes_several_rows
    drawn = SamplingParams(temperature=0.5, top_p=0.9, logprobs=2, logit_bias={3: 1.0})
    made = list(own.run([row(), row(drawn)], 2, threading.Event()))
    assert made == [[result(0, 0), result(0, 1)], [None, result(1, 1)]]
    ((count, rows, steps),) = kernels.calls
    assert (count, steps) == (2, 2)
    given = rows[1]
    assert given is not None
    assert (given.slot, given.token, given.position, given.max_tokens) == (3, 7, 2, 4)
    assert given.tables == {KVGroup.FULL: [5]}
    assert given.stop_token_ids == frozenset({9})
    assert (given.params, given.seed) == (drawn, 1)
    assert given.allowed is None


def test_the_launch_sees_the_sequences_own_lists() -> None:
    """By them the launcher knows a sequence again, and counts its tokens only once."""
    own, kernels = backend()
    one = row()
    list(own.run([one], 1, threading.Event()))
    ((_, (given,), _),) = kernels.calls
    assert given is not None
    assert given.prompt is one.prompt
    assert given.output is one.output


def test_rows_that_feed_a_prompt_ask_for_nothing_and_disturb_no_history() -> None:
    """Behind a row whose tokens the device counts, in the launch between two of its own."""
    inputs = RowInputs(4, 64, torch.device("cpu"))
    counted = row(SamplingParams(temperature=0, frequency_penalty=0.5, max_tokens=9))
    inputs.fill([launch_row(counted)])
    inputs.ran([launch_row(counted)], [[11]])
    counted.output = [7, 11]
    counted.token, counted.position = 11, 3
    request = Request(
        prompt=list(range(20, 40)),
        params=SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={3: 9.0}, logprobs=5),
        sink=lambda _: None,
        max_tokens=9,
        stop_token_ids=frozenset({3}),
    )
    sequence = Sequence(request, SequenceBlocks({}), cast(TextAssembler, None), computed=4, slot=1)
    fed = sequence.fed_rows(3)
    inputs.fill([launch_row(one) for one in [counted, *fed]])
    inputs.send()
    written = inputs._rows.device.numpy().view(ROW_INPUT)
    assert written["flags"].tolist() == [
        RowFlag.CHANGED | RowFlag.COUNTED | RowFlag.UNCOUNTED, 0, 0, 0
    ], "the first goes on with what the device has counted"  # fmt: skip
    assert written["token"].tolist() == [11, 24, 25, 26]
    assert written["position"].tolist() == [3, 4, 5, 6]
    assert written["slot"].tolist() == [3, 1, 1, 1]
    assert written["max_tokens"][1:].tolist() == [1, 1, 1]
    assert written["stop_count"][1:].tolist() == written["logprobs"][1:].tolist() == [0, 0, 0]


def test_an_interrupt_ends_the_call() -> None:
    own, _ = backend()
    interrupt = threading.Event()
    interrupt.set()
    assert len(list(own.run([row()], 16, interrupt))) == 1


def test_one_constraint_makes_every_row_of_the_call_take_one_step_under_its_mask() -> None:
    own, kernels = backend()
    masks: list[Mask | None] = [mask_of([4], 64), None]
    held = row(constraint=Grammar(list(masks)))
    for _ in range(2):
        assert len(list(own.run([row(), held], 8, threading.Event()))) == 1
    for (_, (free, given), steps), mask in zip(kernels.calls, masks, strict=True):
        assert steps == 1
        assert free is not None
        assert given is not None
        assert free.allowed is None
        if mask is None:  # anything goes here, but what comes next is known only after this token
            assert given.allowed is None
        else:
            np.testing.assert_array_equal(given.allowed, mask)
