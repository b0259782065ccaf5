"""What `headrace check` compares passes for a right kernel and fails for wrong ones (all of them oracles)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.kernel.check import against_oracle
from headrace.kernel.check.against_model import (
    ModelBench,
    noise_ratio,
    parting_ratio,
    random_prompts,
)
from headrace.kernel.check.against_oracle import BOUND, COMPARED, MARGIN, Bench
from headrace.kernel.check.kernels import MakeKernel, Rows, Tokens
from headrace.kernel.check.sampling import KINDS, wrong_draws
from headrace.kernel.check.suite import Planned, Suite, verdict
from headrace.kernel.check.verdict import Check, failed
from headrace.model.synthetic import synthetic_model
from headrace.step.isa import Buffer
from headrace.step.oracle.world import north
from headrace.step.pack import pack_synthetic
from headrace.step.packed_model import packed_model
from tests.kernel.check.fakes import (
    OracleKernel,
    every_other_kernel,
    kernel,
    last_bit,
    not_a_number,
    scaled,
)

LENGTHS = ([1, 64, 200], 4, 1)


def bench(make: MakeKernel) -> Bench:
    return Bench(*LENGTHS, make=make, device="cpu", sms=3)


def model_bench(make: MakeKernel) -> ModelBench:
    model = synthetic_model(north(), seed=2, dtype=torch.bfloat16)
    return ModelBench(model, random_prompts(model.config, [65, 130]), 2, make=make, sms=3)


def test_a_right_kernel_passes_every_comparison() -> None:
    assert set(against_oracle.step_errors(bench(kernel())).values()) == {0.0}
    assert against_oracle.parting_margin(bench(kernel()), steps=3) == 0
    assert against_oracle.changed_by_launches(bench(kernel()), steps=2) == 0
    assert against_oracle.changed_by_others(bench(kernel()), steps=2) == 0
    both = [Bench([130], rows, make=kernel(), device="cpu", sms=3) for rows in (1, 4)]
    assert against_oracle.changed_by_capacity(both, steps=2) == 0
    assert noise_ratio(model_bench(kernel())) <= 1.5
    assert parting_ratio(model_bench(kernel()), launches=1, steps=3) <= 1


@pytest.mark.parametrize("buffer", [*COMPARED, Buffer.LOGITS])
def test_a_wrong_buffer_fails(buffer: Buffer) -> None:
    errors = against_oracle.step_errors(bench(kernel(spoil=scaled(buffer, 1.02))))
    assert [name for name, error in errors.items() if not error <= BOUND] == [buffer.name]
    missing = against_oracle.step_errors(bench(kernel(spoil=not_a_number(buffer))))
    assert not against_oracle.worst(missing) <= BOUND


def test_wrong_tokens_fail() -> None:
    assert against_oracle.parting_margin(bench(kernel(shift=1)), steps=3) > MARGIN
    assert parting_ratio(model_bench(kernel(shift=1)), launches=1, steps=3) > 1


def test_draws_are_the_references_or_counted() -> None:
    assert wrong_draws(bench(kernel())) == 0
    assert wrong_draws(bench(kernel(shift=1))) == 3 * len(KINDS)  # every token of the three rows
    logits = wrong_draws(bench(kernel(spoil=scaled(Buffer.LOGITS, 3.0))))
    assert 0 < logits < 3 * len(KINDS)  # drawn from others than those that were left


def test_draws_of_a_later_step_are_the_references_or_counted() -> None:
    assert wrong_draws(bench(kernel()), rounds=3, steps=2) == 0
    assert wrong_draws(bench(kernel(shift=1)), rounds=3, steps=2) == 3 * 3


def test_a_launch_that_ends_too_early_fails() -> None:
    class Short(OracleKernel):
        def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]:
            yield from super().launch(rows, steps - 1)

    def make(plan: object, weights: object, cache: object, blocks: int, strict: bool) -> OracleKernel:
        return Short(plan, weights, cache)  # type: ignore[arg-type]

    assert against_oracle.parting_margin(bench(make), steps=3) == math.inf
    assert parting_ratio(model_bench(make), launches=1, steps=3) == math.inf


def test_one_bit_that_depends_on_the_launch_fails() -> None:
    make = every_other_kernel(last_bit)
    assert against_oracle.changed_by_launches(bench(make), steps=2) > 0
    assert against_oracle.changed_by_others(bench(every_other_kernel(last_bit)), steps=2) > 0
    make = every_other_kernel(last_bit)
    both = [Bench([130], rows, make=make, device="cpu", sms=3) for rows in (1, 4)]
    assert against_oracle.changed_by_capacity(both, steps=2) > 0


def test_bits_that_are_no_numbers_differ() -> None:
    make = kernel(spoil=not_a_number(Buffer.LOGITS))
    assert against_oracle.changed_by_others(bench(make), steps=1) > 0


def test_a_model_that_reads_packed_weights_is_no_other() -> None:
    packed = pack_synthetic(north(), seed=2, device="cpu", dtype=torch.bfloat16)
    prompts = random_prompts(north(), [65, 130])
    own = ModelBench(packed_model(packed), prompts, 2, packed=packed, make=kernel(), sms=3)
    plain = model_bench(kernel())
    assert torch.equal(own.model_logits(), plain.model_logits())
    assert torch.equal(own.exact_logits(), plain.exact_logits())
    assert noise_ratio(own) == noise_ratio(plain) <= 1.5


def test_logits_far_from_float32_fail() -> None:
    assert noise_ratio(model_bench(kernel(spoil=scaled(Buffer.LOGITS, 1.05)))) > 1.5
    assert math.isnan(noise_ratio(model_bench(kernel(spoil=not_a_number(Buffer.LOGITS)))))


def suite(make: MakeKernel) -> Suite:
    """With a small model in the place of the wide one, without north-micro."""
    return Suite(None, make=make, device="cpu", sms=3, wide=north(), wide_settings=[([65], 1)])


def small(make: MakeKernel) -> list[Planned]:
    """One check of each kind but one, which the oracle takes long for."""
    kinds: dict[str, Planned] = {}
    for planned in suite(make).checks():
        kinds.setdefault(planned.name.split(":")[0], planned)
    return [planned for kind, planned in kinds.items() if "one launch" not in kind]


def test_the_suite_is_green_for_a_right_kernel_and_red_for_a_wrong_one() -> None:
    green = [planned.run() for planned in small(kernel())]
    assert all(check.passed for check in green), [str(check) for check in green]
    assert len(green) == 7
    red = [planned.run() for planned in small(every_other_kernel(scaled(Buffer.LOGITS, 1.05)))]
    assert [check.passed for check in red].count(False) >= 3  # every second kernel is right


def test_north_micro_takes_part_where_its_weights_are(tmp_path: Path) -> None:
    without = {planned.name for planned in suite(kernel()).checks()}
    with_it = {planned.name for planned in replace(suite(kernel()), micro=tmp_path).checks()}
    assert without < with_it
    assert any("north-micro" in name for name in with_it)
    assert len(with_it) == len(replace(suite(kernel()), micro=tmp_path).checks())  # no two of one name


def test_an_error_is_a_failed_check_and_not_the_end() -> None:
    def broken(*arguments: object) -> OracleKernel:
        raise RuntimeError("the kernel gave up")

    check = small(broken)[0].run()
    assert not check.passed
    assert str(check).startswith("FAILED")
    assert "RuntimeError: the kernel gave up" in str(check)
    assert check.as_json()["figure"] is None


def test_verdicts() -> None:
    good, bad, none = Check("a", 0.5, 1), Check("b", 2, 1), failed("c", 1, "why")
    assert verdict([good, good]) == "All 2 checks passed: the decode kernel is right on this machine."
    assert verdict([good, bad, none]).startswith("2 of 3 checks failed: the decode kernel is NOT right")
    assert verdict([]).startswith("0 of 0 checks failed: the decode kernel is NOT right")
    assert good.as_json() == {"name": "a", "passed": True, "figure": 0.5, "bound": 1}
    assert Check("d", math.inf, 1).as_json()["figure"] is None
    assert not Check("e", math.nan, 1).passed
