"""The tests of sampling on a GPU, tried with the oracle in the kernel's place, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.model.kv import KVCache
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import PackedWeights
from tests.kernel import test_sampling_on_gpu as gpu
from tests.kernel.check.fakes import OracleKernel
from tests.step.oracle.setting import PARAMS


class Played(OracleKernel):
    """The oracle as a launcher; `miscount` makes it forget what came before the launch."""

    miscount = False

    def run(self, rows: gpu.Rows, steps: int) -> Iterator[gpu.Results]:
        given: list[LaunchRow | None] = [
            replace(row, output=[]) if row is not None and self.miscount else row for row in rows
        ]
        # The lists grow while the launch runs.
        given = [row and replace(row, output=tuple(row.output)) for row in given]
        for results in self.oracle.launch(given, steps):
            yield list(results) + [None] * (len(rows) - len(results))


class OnCPU(gpu.Bench):
    device, sms = "cpu", 2

    def make(self, packed: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> gpu.Kernel:
        return Played(self.plan, packed, cache)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "Bench", OnCPU)


def test_the_right_kernel_passes() -> None:
    gpu.test_every_parameter_beside_others(4, False)
    gpu.test_many_steps_are_as_many_launches(1, 0)
    gpu.test_ties_go_to_the_lowest_ids(4)
    gpu.test_forbidden_tokens_are_never_taken()
    gpu.test_a_row_without_a_finite_logit_ends_alone(PARAMS["all three"])


def test_frequencies_of_the_right_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRAWS", 300)
    gpu.test_frequencies_follow_the_stated_distribution({"temperature": 3.0, "top_p": 0.8})


def test_a_miscount_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Played, "miscount", True)
    with pytest.raises(AssertionError):
        gpu.test_many_steps_are_as_many_launches(1, 4)


def test_a_draw_by_another_seed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Played.run

    def run(self: Played, rows: gpu.Rows, steps: int) -> Iterator[gpu.Results]:
        return honest(self, [row and replace(row, seed=row.seed + 1) for row in rows], steps)

    monkeypatch.setattr(Played, "run", run)
    with pytest.raises(AssertionError, match="row"):
        gpu.test_every_parameter_beside_others(4, False)
