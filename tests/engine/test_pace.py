"""How much prompt a step takes in beside running streams."""

from __future__ import annotations

import random

import pytest

from headrace.engine.pace import FEWEST, Pace


def run(
    pace: Pace, *, token_cost: float, decode: float, steps: int = 30, fixed: float = 0.0, noise: float = 0.0
) -> list[float]:
    """Feed an endless prompt on a machine with these costs; the gap of every step in seconds."""
    gaps, draw = [], random.Random(4)
    for _ in range(steps):
        tokens = pace.tokens(streams=4)
        prefill = (fixed + tokens * token_cost) * (1 + noise * draw.uniform(-1, 1))
        gaps.append(prefill + decode)
        pace.observe(prompt_tokens=tokens, prefill=prefill, decode=decode, steps=1)
    return gaps


def test_nobody_waits_then_the_chunk_is_as_large_as_it_may_be() -> None:
    assert Pace(most=2048, gap=0.04).tokens(streams=0) == 2048


@pytest.mark.parametrize("token_cost", [20e-6, 100e-6, 500e-6])
def test_gaps_stay_within_the_bound_and_use_it(token_cost: float) -> None:
    gaps = run(Pace(most=4096, gap=0.04), token_cost=token_cost, decode=0.002)
    assert max(gaps) < 0.044
    assert gaps[-1] > 0.035


def test_a_prompt_gets_done_where_the_bound_cannot_be_met() -> None:
    pace = Pace(most=2048, gap=0.04)
    run(pace, token_cost=3e-3, decode=0.1)
    assert pace.tokens(streams=1) == FEWEST


def test_costs_that_rise_along_a_prompt_are_followed() -> None:
    pace = Pace(most=4096, gap=0.04)
    run(pace, token_cost=20e-6, decode=0.002)
    gaps = run(pace, token_cost=60e-6, decode=0.002)
    assert gaps[-1] < 0.044


def test_the_largest_chunk_is_kept_to() -> None:
    pace = Pace(most=100, gap=10.0)
    run(pace, token_cost=1e-6, decode=0.001)
    assert pace.tokens(streams=1) == 100


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seen", [False, True])
def test_chunks_that_cost_more_than_the_bound_are_not_made_tiny(noise: float, seen: bool) -> None:
    """As where all weights are unpacked for every chunk: 40 ms, however few its tokens are."""
    pace = Pace(most=8192, gap=0.04)
    if seen:  # a prompt that nobody had to wait for
        pace.observe(prompt_tokens=8192, prefill=0.04 + 8192 * 20e-6, decode=0.0, steps=0)
    gaps = run(pace, token_cost=20e-6, fixed=0.04, decode=0.002, steps=60, noise=noise)
    late = sorted(gaps[20:])
    assert 0.06 < late[len(late) // 2] < 0.11, "as much for the tokens as for the chunk"
    assert late[-1] < 0.2


def test_a_bound_that_can_be_met_is_met_beside_a_fixed_cost() -> None:
    gaps = run(Pace(most=8192, gap=0.1), token_cost=20e-6, fixed=0.04, decode=0.002)
    assert max(gaps) < 0.105
    assert gaps[-1] > 0.09


def test_one_large_chunk_tells_how_a_slow_machine_is() -> None:
    pace = Pace(most=2048, gap=0.04)
    gaps = run(pace, token_cost=3e-3, decode=0.1)
    assert sum(gap > 0.1 + 1.01 * FEWEST * 3e-3 for gap in gaps) == 1
