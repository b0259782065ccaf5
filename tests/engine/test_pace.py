"""How much prompt a step takes in beside running streams."""

from __future__ import annotations

import random

import pytest

from headrace.engine.filling import Filling, Part
from headrace.engine.pace import FEWEST, Pace
from headrace.model.batch import Span


def run(
    pace: Pace, *, token_cost: float, decode: float, steps: int = 30, fixed: float = 0.0, noise: float = 0.0
) -> list[float]:
    """Feed an endless prompt on a machine with these costs; the gap of every step in seconds."""
    gaps, draw = [], random.Random(4)
    for _ in range(steps):
        tokens = pace.tokens(streams=4)
        prefill = (fixed + tokens * token_cost) * (1 + noise * draw.uniform(-1, 1))
        gaps.append(prefill + decode)
        pace.observe(prompt_tokens=tokens, prefill=prefill, decode=decode, steps=1, rows=4)
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


def test_chunks_of_one_size_are_not_for_ever() -> None:
    """A guess of a size that is far too small would else never be put right: all chunks bear it out."""
    pace = Pace(most=8192, gap=0.04, layered=True)
    sizes = []
    for step in range(60):
        tokens = pace.tokens(streams=4)
        prefill = CHUNK / 1000 + TOKEN / 1000 * tokens * (8 if step < 20 else 1)
        pace.observe(prompt_tokens=tokens, prefill=prefill, decode=0.005, steps=1, rows=4)
        sizes.append(tokens)
    assert max(sizes[15:20]) < 1500, "tokens cost eight times as much at first"
    assert min(sizes[45:]) > 4000


def test_a_step_that_took_long_does_not_make_room_for_prompts() -> None:
    pace = learnt(Pace(most=8192, gap=0.04, layered=True))
    chunk = Filling([Span([1] * 5000, 0, {})], [], lambda layers: None, [True] * 49, left=46)
    chunk.parts.append(Part(3, 3, 0.006))
    before = pace.layers(chunk, rows=4)
    pace.observe(prompt_tokens=0, prefill=0, decode=2.0, steps=1, rows=4)
    assert pace.layers(chunk, rows=4) == before > 5


def test_no_long_prompt_rides_whatever_a_chunk_is_thought_to_cost() -> None:
    pace = Pace(most=8192, gap=0.04)
    for tokens in (200, 500):
        pace.observe(prompt_tokens=tokens, prefill=0.003 * tokens, decode=0.005, steps=1, rows=4)
    pace.observe(prompt_tokens=0, prefill=0, decode=0.015, steps=1, rows=16)
    assert pace.rides(16 * 12, streams=4, free=12)
    assert not pace.rides(16 * 12 + 1, streams=4, free=12)


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
        pace.observe(prompt_tokens=8192, prefill=0.04 + 8192 * 20e-6, decode=0.0, steps=0, rows=0)
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


# Milliseconds as measured: decode steps of the kernel by their rows, and a chunk of prompt.
STEPS = {1: 2.3, 2: 3.2, 4: 5.0, 8: 8.8, 16: 15.1}
CHUNK, TOKEN = 36.0, 0.022


def step_cost(rows: int) -> float:
    return next(cost for capacity, cost in STEPS.items() if capacity >= rows) / 1000


def learnt(pace: Pace) -> Pace:
    """One that has seen the kernel at work."""
    for _ in range(20):
        for rows in STEPS:
            pace.observe(prompt_tokens=0, prefill=0, decode=4 * step_cost(rows), steps=4, rows=rows)
        for tokens in (100, 1000, 400):
            prefill = (CHUNK + TOKEN * tokens) / 1000
            pace.observe(prompt_tokens=tokens, prefill=prefill, decode=0, steps=0, rows=0)
    return pace


def times(tokens: int, streams: int, free: int) -> tuple[float, float]:
    """Seconds until a piece is there, by rows and by a chunk with the step after it."""
    rides = -(-tokens // free) * step_cost(streams + min(tokens, free))
    bare = step_cost(streams) if streams else 0.0
    return rides, (CHUNK + TOKEN * tokens) / 1000 + bare


@pytest.mark.parametrize("streams", range(16))
def test_a_piece_rides_where_that_is_sooner(streams: int) -> None:
    pace, free = learnt(Pace(most=8192, gap=0.04)), 16 - streams
    chosen = {}
    for tokens in (1, 5, 12, 16, 24, 32, 40, 60, 100, 500):
        rows, chunk = times(tokens, streams, free)
        chosen[tokens] = pace.rides(tokens, streams=streams, free=free)
        assert chosen[tokens] == (rows <= chunk) or abs(rows - chunk) < 0.1 * chunk
    assert chosen[1]
    assert not chosen[500]


def test_before_costs_are_known_a_piece_rides_if_one_step_takes_it() -> None:
    pace = Pace(most=8192, gap=0.04)
    assert pace.rides(12, streams=4, free=12)
    assert not pace.rides(13, streams=4, free=12)
    assert not pace.rides(1, streams=4, free=0)
    pace.observe(prompt_tokens=900, prefill=0.06, decode=0.005, steps=1, rows=4)  # one chunk tells too little
    assert pace.rides(12, streams=4, free=12)
    assert not pace.rides(13, streams=4, free=12)


def test_a_step_that_never_was_costs_no_more_than_its_rows_by_themselves() -> None:
    pace = Pace(most=8192, gap=0.04)
    for tokens in (100, 1000, 100, 1000):
        prefill = (CHUNK + TOKEN * tokens) / 1000
        pace.observe(prompt_tokens=tokens, prefill=prefill, decode=0.0088, steps=1, rows=8)
    assert pace.rides(9, streams=8, free=8), "two steps of 17.6 ms"
    assert not pace.rides(25, streams=8, free=8)


def test_while_a_pass_is_under_way_longer_pieces_ride() -> None:
    pace = learnt(Pace(most=8192, gap=0.04))
    assert not pace.rides(60, streams=4, free=12)
    assert pace.rides(60, streams=4, free=12, wait=0.1)
    assert not pace.rides(200, streams=4, free=12, wait=0.1)


def test_a_chunk_of_layers_is_smaller_where_other_prompts_wait_for_its_end() -> None:
    pace = learnt(Pace(most=8192, gap=0.04, layered=True))
    whole = learnt(Pace(most=8192, gap=0.04))
    for one in (pace, whole):
        one.observe(prompt_tokens=5000, prefill=(CHUNK + TOKEN * 5000) / 1000, decode=0, steps=0, rows=0)
    alone, shared = (pace.tokens(streams=4, prompts=prompts) for prompts in (1, 2))
    assert 2.5 * shared < alone < 3.5 * shared
    assert whole.tokens(streams=4) == whole.tokens(streams=4, prompts=2) == shared


def test_a_slow_first_step_does_not_keep_pieces_from_riding_for_ever() -> None:
    pace = learnt(Pace(most=8192, gap=0.04))
    for _ in range(20):
        pace.observe(prompt_tokens=0, prefill=0, decode=1.0, steps=1, rows=12)
    asked = 0
    while not pace.rides(12, streams=0, free=16):
        asked += 1
    assert 10 < asked < 300
    pace.observe(prompt_tokens=0, prefill=0, decode=0.015, steps=1, rows=12)
    assert pace.rides(12, streams=0, free=16)


def test_where_steps_cost_more_than_chunks_pieces_seldom_ride() -> None:
    """A step of 12 rows of 0.1 seconds, which a chunk of 0.04 would spare: one in 30 is tried again."""
    pace = learnt(Pace(most=8192, gap=0.04))
    rode = 0
    for _ in range(600):
        if pace.rides(12, streams=0, free=16):
            rode += 1
            pace.observe(prompt_tokens=0, prefill=0, decode=0.1, steps=1, rows=12)
        else:
            prefill = (CHUNK + TOKEN * 12) / 1000
            pace.observe(prompt_tokens=12, prefill=prefill, decode=0, steps=0, rows=0)
    assert rode < 40


def test_small_chunks_do_not_make_tokens_look_dear() -> None:
    """As a server's log had it: four rehearsed passes and two short prompts made 35 us of 14, and chunks of
    4,781 tokens of 8,192."""
    pace = Pace(most=8192, gap=0.04, layered=True)
    seen = {64: 53, 512: 55, 2048: 70, 8192: 169, 63: 58.4, 189: 66.6}
    for tokens, milliseconds in seen.items():
        pace.observe(prompt_tokens=tokens, prefill=milliseconds / 1000, decode=0.0, steps=0, rows=0)
    assert pace._cost.of(8192) == pytest.approx(0.169, rel=0.05)
    assert pace.tokens(streams=4) == 8192
