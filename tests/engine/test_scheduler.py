"""Who gets how much of a step's budget of prompt tokens, and who comes first."""

from __future__ import annotations

from functools import partial

import pytest

from headrace.engine.engine import Engine
from headrace.engine.scheduler import end_of_chunk, shares
from headrace.engine.sequence import Sequence
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import Client, ledger_engine, prompt_of

FULL = KVGroup.FULL


def waiting(engine: Engine, *lengths: int) -> list[Sequence]:
    """Sequences with prompts of these lengths, in order of arrival."""
    for number, length in enumerate(lengths, start=1):
        engine.submit(prompt_of(number, length), SamplingParams(max_tokens=3), lambda _: None)
    return list(engine._arrived)


def budget_of(*lengths: int, budget: int) -> list[int]:
    engine, _ = ledger_engine({FULL: 64}, max_context=4000)
    return [tokens for _, tokens in shares(waiting(engine, *lengths), budget)]


def test_one_prompt_takes_the_whole_budget() -> None:
    assert budget_of(1001, budget=96) == [96]


def test_small_prompts_pass_a_big_one_that_keeps_half() -> None:
    assert budget_of(1001, 31, 21, budget=96) == [48, 28, 20]


def test_what_small_prompts_leave_goes_to_the_big_one() -> None:
    assert budget_of(1001, 11, budget=96) == [86, 10]


def test_the_oldest_takes_no_more_than_it_needs() -> None:
    assert budget_of(11, 1001, budget=96) == [10, 86]


def test_a_budget_of_one_token_is_the_oldests() -> None:
    assert budget_of(1000, 100, budget=1) == [1, 0]


def test_a_full_pool_stops_nobody_for_ever_whatever_the_budget() -> None:
    """The oldest has a block of the two, and a younger one the other, of which it needs one more."""
    engine, _ = ledger_engine({FULL: 2}, chunk_tokens=1, max_context=128)
    client = Client(engine)
    requests = []
    for number, length in ((1, 41), (2, 94), (3, 96)):
        client.tokens[number] = []
        params = SamplingParams(max_tokens=3)
        requests.append(engine.submit(prompt_of(number, length), params, partial(client.sink, number)))
    for _ in range(38):
        engine.step()
    engine.cancel(requests[0])
    for _ in range(1000):
        if not engine.step():
            break
    assert {2, 3} <= set(client.reasons)


def test_no_prompts_no_shares() -> None:
    assert shares([], 96) == []


@pytest.mark.parametrize(
    ("computed", "tokens", "end"),
    [
        (0, 8192, 8192),
        (0, 4781, 4096),
        (9562, 8192, 17_408),  # 346 tokens more would have stuck out, and of every chunk that follows
        (1023, 2050, 3072),
        (1023, 2048, 3071),  # a whole tile, and one that is worth too little by itself
        (0, 2047, 2047),
        (15_000, 4999, 19_999),  # all that the prompt has: no pass for the rest
        (15_000, 4998, 19_456),
    ],
)
def test_a_chunk_ends_with_a_whole_tile_or_with_its_prompt(computed: int, tokens: int, end: int) -> None:
    engine, _ = ledger_engine({FULL: 400}, max_context=21_000)
    [sequence] = waiting(engine, 20_000)
    sequence.computed = computed
    assert end_of_chunk(sequence, tokens) == end


def test_a_short_request_answers_while_a_long_prompt_is_filled() -> None:
    """OpenCode sends its title request beside the main one: neither waits for the other's whole prompt."""
    engine, _ = ledger_engine({FULL: 64}, chunk_tokens=64, max_context=4000)
    client = Client(engine)
    for number, length in ((1, 2000), (2, 30)):
        client.tokens[number] = []
        engine.submit(prompt_of(number, length), SamplingParams(max_tokens=5), partial(client.sink, number))
    steps = 0
    while 2 not in client.reasons:
        engine.step()
        steps += 1
    assert steps < 10
    assert not client.tokens[1]


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    engine, _ = ledger_engine({FULL: 64}, chunk_tokens=64, max_context=4000)
    client = Client(engine)
    client.tokens[1] = []
    engine.submit(prompt_of(1, 1000), SamplingParams(max_tokens=1), partial(client.sink, 1))
    number = 1
    while 1 not in client.reasons:
        number += 1
        client.tokens[number] = []
        engine.submit(prompt_of(number, 64), SamplingParams(max_tokens=1), partial(client.sink, number))
        engine.step()
        assert number < 60, "half of every budget is 32 tokens: 1,000 take 32 steps"


@pytest.mark.parametrize("slot", [0, 3])
def test_a_slot_that_is_lost_is_noticed(slot: int) -> None:
    """Also the last, without which the others look complete."""
    engine, _ = ledger_engine({FULL: 8}, max_sequences=4)
    engine.check()
    engine._scheduler._free_slots.remove(slot)
    with pytest.raises(RuntimeError, match="are not each of 4 once"):
        engine.check()
