"""Repeated launches come to the same, or it is seen: tried with oracles in the kernel's place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headrace.kernel.check.against_oracle import Bench
from headrace.kernel.check.kernels import Kernel, MakeKernel, Rows, Tokens
from headrace.kernel.check.stress import changed_under_stress, hops, outcome
from headrace.model.kv import KVCache
from headrace.step.isa import Buffer
from headrace.step.oracle.world import north
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.kernel.check.fakes import OracleKernel, kernel, not_a_number

STEPS = 2


class Unsteady(OracleKernel):
    """One launch in three goes wrong, by `what`."""

    what = ""
    launches = 0

    def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]:
        self.launches += 1
        made = list(super().launch(rows, steps))
        if self.what == "a token" and self._wrong:
            made[0] = [None if token is None else (token + 1) % 300 for token in made[0]]
        yield from made[: -1 if self.what == "a step" and self._wrong else None]

    def buffer(self, buffer: Buffer) -> torch.Tensor:
        values = super().buffer(buffer)
        if self._wrong and self.what == buffer.name:
            values[0, 0, 0] = torch.nextafter(values[0, 0, 0], torch.tensor(math.inf))
        return values

    @property
    def _wrong(self) -> bool:
        return self.launches % 3 == 0


def bench(make: MakeKernel) -> Bench:
    return Bench([63, 70], 2, make=make, device="cpu", sms=2)


def changed(bench: Bench, kernel: Kernel, repeats: int, *, at_once: bool = True) -> int:
    right = outcome(kernel, bench.plan, bench.rows, STEPS)
    count = hops(bench.plan) * STEPS * repeats
    return changed_under_stress(kernel, bench.plan, bench.rows, right, count, at_once=at_once)


def test_a_steady_kernel_passes_in_one_launch_or_many() -> None:
    of = bench(kernel())
    assert changed(of, of.kernel(), 2) == 0
    assert changed(of, of.kernel(), 1, at_once=False) == 0


@pytest.mark.parametrize("what", ["a token", "a step", "LOGITS", "X"])
def test_what_changes_now_and_then_is_seen(what: str) -> None:
    def make(plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> OracleKernel:
        made = Unsteady(plan, weights, cache)
        made.what = what
        return made

    of = bench(make)
    assert changed(of, of.kernel(), 6) == 2


def test_what_is_no_number_is_seen() -> None:
    of = bench(kernel(spoil=not_a_number(Buffer.LOGITS)))
    assert changed(of, of.kernel(), 1) == 1


def test_hops_are_counted_once_a_counter() -> None:
    """Two KV heads' q, k and v, attention, its merge, up and down; and in two layers the router."""
    plan = build_plan(north(), rows=2, sms=2)
    assert hops(plan) == 3 * 6 + 2
    assert hops(build_plan(replace(north(), layers=north().layers * 3), rows=2, sms=2)) == 3 * 20
