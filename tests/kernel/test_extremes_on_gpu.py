"""The kernel on a Hopper GPU where contexts, lengths and routings are extreme.

As `tests.kernel.test_extremes_emulated` on the host, which sees faults of these kinds.
"""

from __future__ import annotations

import pytest

from headrace.kernel.build import build_all
from headrace.kernel.check.against_oracle import BOUND, ROW_BOUND, Bench, row_errors, step_errors, worst
from headrace.kernel.variant import variant_of
from headrace.step.oracle.past import NoisyPast
from headrace.step.planner import build_plan
from tests.kernel.extremes import CONTEXTS, EDGES, ROUTINGS, WIDE_WINDOW, routed, routing_errors
from tests.recording import RecordCheck

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All kernels of these tests, side by side: one by one they take longer than the tests."""
    plans = [build_plan(WIDE_WINDOW, rows=8, sms=132)]
    plans += [build_plan(routed(name)[1], rows=16, sms=132) for name in ROUTINGS]
    build_all([variant_of(plan) for plan in plans])


def test_contexts_from_1_to_262144_tokens(record_check: RecordCheck) -> None:
    bench = Bench(CONTEXTS, 8, 3, config=WIDE_WINDOW, world=NoisyPast)
    for buffer, error in row_errors(bench).items():
        record_check(f"{buffer}, worst row of contexts of 1 to 262,144 tokens", error, ROW_BOUND)


def test_lengths_around_every_edge(record_check: RecordCheck) -> None:
    errors = step_errors(Bench(EDGES, 16))
    record_check("worst buffer at lengths around every edge", worst(errors), BOUND)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name: str, record_check: RecordCheck) -> None:
    lengths, config = routed(name)
    errors = routing_errors(Bench(lengths, 16, config=config), name)
    record_check(f"worst buffer with {name}", worst(errors), BOUND)
