"""The kernel on a Hopper GPU where it runs a Llama: against the oracle, against PyTorch, and its own bits.

As `tests.kernel.test_llama_emulated` on the host, which sees faults of these kinds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.kernel.build import build_all
from headrace.kernel.check.against_model import NOISE, ModelBench, noise_ratio, parting_ratio, random_prompts
from headrace.kernel.check.against_oracle import (
    BOUND,
    MARGIN,
    SETTINGS,
    Bench,
    changed_by_capacity,
    changed_by_launches,
    changed_by_others,
    parting_margin,
    step_errors,
    worst,
)
from headrace.kernel.check.stress import changed_under_stress, outcome
from headrace.kernel.variant import variant_of
from headrace.model.config import ModelConfig
from headrace.model.presets import PRESETS
from headrace.model.synthetic import synthetic_model
from headrace.step.oracle.world import llama
from headrace.step.planner import build_plan
from tests.kernel.llamas import LLAMA_8B, SHAPES, WIDE
from tests.recording import RecordCheck

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

HOPS = 100_000
STEPS = 16
LENGTHS = [5, 63, 64, 65, 128, 700]
# Whole, or the first layers: the others are like them.
MODELS = {
    "SmolLM2 135M": PRESETS["smollm2-135m"],
    "four layers of Llama 3.2 1B": replace(
        PRESETS["llama-3.2-1b"], layers=PRESETS["llama-3.2-1b"].layers[:4]
    ),
    "two layers of Llama 3.1 8B": replace(LLAMA_8B, layers=LLAMA_8B.layers[:2]),
}
CAPACITIES = {
    "SmolLM2 135M": (8, 16),
    "four layers of Llama 3.2 1B": (8, 16),
    "two layers of Llama 3.1 8B": (8,),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All kernels of these tests, side by side: one by one they take longer than the tests."""
    plans = [build_plan(llama(), rows=rows, sms=132) for _, rows, _ in SETTINGS]
    variants = [variant_of(plan, strict=strict) for plan in plans for strict in (False, True)]
    others = [build_plan(config, rows=16, sms=132) for config in (*SHAPES.values(), WIDE)]
    others += [build_plan(MODELS[name], rows=rows, sms=132) for name in MODELS for rows in CAPACITIES[name]]
    build_all([*variants, *map(variant_of, others)])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_a_step_leaves_what_the_oracle_leaves(
    lengths: list[int], rows: int, hole: int | None, strict: bool, record_check: RecordCheck
) -> None:
    errors = step_errors(Bench(lengths, rows, hole, config=llama()), strict=strict)
    record_check(f"worst buffer of a Llama, {rows} rows{', by the book' * strict}", worst(errors), BOUND)


@pytest.mark.parametrize("name", [*SHAPES, "wide"])
def test_other_sizes(name: str, record_check: RecordCheck) -> None:
    errors = step_errors(Bench(*SETTINGS[-1], config=SHAPES.get(name, WIDE)))
    record_check(f"worst buffer of a Llama, 16 rows, {name}", worst(errors), BOUND)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_tokens_are_the_oracles_up_to_a_near_tie(
    lengths: list[int], rows: int, hole: int | None, record_check: RecordCheck
) -> None:
    margin = parting_margin(Bench(lengths, rows, hole, config=llama()))
    record_check(f"tokens of a Llama, six steps, {rows} rows, margin where they part", margin, MARGIN)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:])
def test_bits_do_not_depend_on_the_launch_or_on_others(
    lengths: list[int], rows: int, hole: int | None, record_check: RecordCheck
) -> None:
    bench = Bench(lengths, rows, hole, config=llama())
    changed = changed_by_launches(bench) + changed_by_others(bench)
    record_check(f"what changes of a Llama between launches and companies, {rows} rows", changed, 0)


def test_a_row_has_the_same_bits_at_every_capacity(record_check: RecordCheck) -> None:
    changed = changed_by_capacity([Bench([130], rows, config=llama()) for rows in (1, 2, 4, 8, 16)])
    record_check("what changes of a Llama between capacities of 1, 2, 4, 8 and 16 rows", changed, 0)


def model_bench(config: ModelConfig, rows: int) -> ModelBench:
    model = synthetic_model(config, seed=1, device="cuda", dtype=torch.bfloat16)
    return ModelBench(model, random_prompts(config, LENGTHS), rows)


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name in MODELS for rows in CAPACITIES[name]])
def test_logits_of_models_that_there_are(name: str, rows: int, record_check: RecordCheck) -> None:
    """Of their shapes, with random weights."""
    ratio = noise_ratio(model_bench(MODELS[name], rows))
    record_check(f"logits of {name}, {rows} rows, in PyTorch's own error", ratio, NOISE)


def test_tokens_of_smollm2_up_to_a_near_tie(record_check: RecordCheck) -> None:
    """The model follows the kernel's tokens, and would have taken each itself but for rounding."""
    ratio = parting_ratio(model_bench(MODELS["SmolLM2 135M"], 8))
    record_check("32 tokens of SmolLM2's shape, 8 rows, margin in PyTorch's own noise", ratio, 1)


@pytest.mark.parametrize(("lengths", "rows", "hole"), [SETTINGS[0], SETTINGS[4]])
def test_hops(lengths: list[int], rows: int, hole: int | None, record_check: RecordCheck) -> None:
    """Words of one tile come from warps that have two tiles of weights: none is read before it is there."""
    bench = Bench(lengths, rows, hole, config=llama())
    kernel = bench.kernel()
    right = outcome(kernel, bench.plan, bench.rows, STEPS)
    changed = changed_under_stress(kernel, bench.plan, bench.rows, right, HOPS)
    record_check(f"launches of a Llama that changed in {HOPS:,} hops, {rows} rows", changed, 0)
