"""A million hops from SM to SM with every exchange buffer poisoned between launches: always the same bits.

The comparison is tried without a GPU in `tests.kernel.check.test_stress`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.kernel.build import build_all
from headrace.kernel.check.against_model import NORTHS_WIDTHS, ModelBench, random_prompts
from headrace.kernel.check.against_oracle import Bench
from headrace.kernel.check.stress import changed_under_stress, outcome
from headrace.kernel.variant import variant_of
from headrace.model.config import ModelConfig
from headrace.model.synthetic import synthetic_model
from headrace.step.oracle.world import north
from headrace.step.planner import build_plan
from tests.recording import RecordCheck

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MILLION = 1_000_000
STEPS = 16
SETTINGS = [([57], 1), ([57, 64, 120, 1], 4)] + [([50 + n for n in range(rows)], rows) for rows in (8, 16)]


def deep() -> ModelConfig:
    """Many layers with little to do, so that hops are most of a step; wide enough that all SMs take part."""
    dense, *sparse = north().layers
    return replace(north(), hidden_size=1024, layers=(dense, *sparse * 6))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All kernels of these tests, side by side: one by one they take longer than the tests."""
    plans = [build_plan(deep(), rows=rows, sms=132) for _, rows in SETTINGS]
    variants = [variant_of(plan, strict=strict) for plan in plans for strict in (False, True)]
    build_all([*variants, variant_of(build_plan(NORTHS_WIDTHS, rows=4, sms=132))])


@pytest.mark.parametrize(("lengths", "rows"), SETTINGS)
def test_a_million_hops(lengths: list[int], rows: int, record_check: RecordCheck) -> None:
    """In launches of 16 steps; a tenth as many in launches of one step, and by the book."""
    bench = Bench(lengths, rows, config=deep())
    kernel, by_the_book = bench.kernel(), bench.kernel(strict=True)
    right = outcome(kernel, bench.plan, bench.rows, STEPS)
    changed = changed_under_stress(kernel, bench.plan, bench.rows, right, MILLION)
    record_check(f"launches that changed in a million hops, {rows} rows", changed, 0)
    changed = changed_under_stress(kernel, bench.plan, bench.rows, right, MILLION // 10, at_once=False)
    record_check(f"launches of one step that changed in 100,000 hops, {rows} rows", changed, 0)
    changed = changed_under_stress(by_the_book, bench.plan, bench.rows, right, MILLION // 10)
    record_check(f"launches that changed in 100,000 hops, {rows} rows, by the book", changed, 0)


def test_hops_at_norths_widths(record_check: RecordCheck) -> None:
    """Memory is as busy as it ever is while signals are under way."""
    model = synthetic_model(NORTHS_WIDTHS, seed=1, device="cuda", dtype=torch.bfloat16)
    bench = ModelBench(model, random_prompts(model.config, [4090, 500, 64, 1]), 4)
    right = outcome(bench.kernel, bench.plan, bench.fed, STEPS)
    changed = changed_under_stress(bench.kernel, bench.plan, bench.fed, right, MILLION // 5)
    record_check("launches that changed in 200,000 hops at North's widths, 4 rows", changed, 0)
