"""A pool too small for all who want it: everybody gets on, in bounded time, and with the same tokens."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import scheduler
from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import FinishReason, Request
from headrace.engine.sequence import Sequence
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tests.engine.ledger import STRIDE, Client, LedgerBackend, ledger_engine, prompt_of
from tests.engine.north import VOCABULARY, generate

FULL, SLIDING = KVGroup.FULL, KVGroup.SLIDING
BLOCKS = 4
CONTEXT = BLOCKS * 64  # the pool holds exactly one of this length


def tight_engine(
    *, window: int | None = None, chunk: int = 64, steps: int = 4, prefix_cache: bool = False
) -> tuple[Engine, LedgerBackend]:
    sizes = {FULL: BLOCKS} if window is None else {FULL: BLOCKS, SLIDING: BLOCKS}
    return ledger_engine(
        sizes,
        window=window,
        chunk_tokens=chunk,
        max_steps=steps,
        max_context=CONTEXT,
        prefix_cache=prefix_cache,
    )


def submit(engine: Engine, client: Client, number: int, prompt: int, answer: int) -> Request:
    client.tokens[number] = []
    params = SamplingParams(max_tokens=answer)
    return engine.submit(prompt_of(number, prompt), params, partial(client.sink, number))


def work(prompt: int, answer: int, chunk: int) -> int:
    """The steps that a request takes with the engine to itself, one token a step."""
    return -(-prompt // chunk) + answer + 2


def assert_answered(client: Client, number: int, prompt: int, answer: int) -> None:
    start = number * STRIDE + prompt
    assert client.tokens[number] == list(range(start, start + answer))
    assert client.reasons[number] is FinishReason.LENGTH


wholes = st.lists(st.integers(1, CONTEXT - 1), min_size=2, max_size=6)


@settings(max_examples=60)
@given(
    prompts=wholes,
    window=st.sampled_from([None, 64, 100]),
    chunk=st.sampled_from([7, 64, 300]),
    steps=st.integers(1, 6),
    prefix_cache=st.booleans(),
)
def test_requests_that_all_want_the_whole_pool_get_it_one_after_another(
    prompts: list[int], window: int | None, chunk: int, steps: int, prefix_cache: bool
) -> None:
    """Nothing deadlocks, and not more is done twice than all of it."""
    engine, _ = tight_engine(window=window, chunk=chunk, steps=steps, prefix_cache=prefix_cache)
    client = Client(engine)
    for number, prompt in enumerate(prompts, start=1):
        submit(engine, client, number, prompt, CONTEXT - prompt)
    bound = 2 * sum(work(prompt, CONTEXT - prompt, max(1, chunk // 2)) for prompt in prompts)
    taken = 0
    while engine.step():
        engine.check()
        taken += 1
        assert taken <= bound, f"still busy after {bound} steps: {engine.state}"
    for number, prompt in enumerate(prompts, start=1):
        assert_answered(client, number, prompt, CONTEXT - prompt)


def steps_until_served(
    engine: Engine, before: list[int], prompt: int, answer: int, others: list[int], chunk: int
) -> tuple[int, int]:
    """Steps that a request takes behind those of `before`, while others keep arriving; and the bound."""
    client = Client(engine)
    for number, length in enumerate(before, start=1):
        submit(engine, client, number, length, CONTEXT - length)
    victim = len(before) + 1
    submit(engine, client, victim, prompt, answer)
    share = max(1, chunk // 2)
    bound = 2 * (sum(work(each, CONTEXT - each, share) for each in before) + work(prompt, answer, share))
    for step in range(1, bound + 1):
        if step % 2 and engine.state.waiting < 40:
            number = victim + step
            submit(engine, client, number, others[step % len(others)], 3)
        engine.step()
        if victim in client.reasons:
            assert_answered(client, victim, prompt, answer)
            return step, bound
    return bound + 1, bound


@settings(max_examples=40)
@given(
    before=st.lists(st.integers(1, CONTEXT - 1), max_size=3),
    prompt=st.integers(1, CONTEXT - 1),
    others=st.lists(st.integers(1, CONTEXT - 3), min_size=1, max_size=4),
    chunk=st.sampled_from([16, 64, 300]),
    steps=st.integers(1, 4),
    prefix_cache=st.booleans(),
)
def test_nobody_starves(
    before: list[int], prompt: int, others: list[int], chunk: int, steps: int, prefix_cache: bool
) -> None:
    """Who comes later never delays a request: its time is bounded by what came before it."""
    engine, _ = tight_engine(chunk=chunk, steps=steps, prefix_cache=prefix_cache)
    taken, bound = steps_until_served(engine, before, prompt, CONTEXT - prompt, others, chunk)
    assert taken <= bound


class LastComeFirstServed(scheduler.Scheduler):
    """Lets in whoever came last."""

    def _admit(self) -> None:
        self.waiting.reverse()
        super()._admit()
        self.waiting.reverse()


def test_an_unfair_scheduler_is_noticed() -> None:
    engine, _ = tight_engine(steps=1)
    engine._scheduler.__class__ = LastComeFirstServed
    taken, bound = steps_until_served(engine, [100, 200], 150, 100, [200, 250], 64)
    assert taken > bound


@settings(max_examples=60)
@given(
    big=st.integers(500, 1500),
    smalls=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    chunk=st.sampled_from([32, 64, 128]),
    after=st.integers(0, 6),
)
def test_small_requests_pass_a_big_one(big: int, smalls: list[int], chunk: int, after: int) -> None:
    small_ones_pass(big, smalls, chunk, after)


def small_ones_pass(big: int, smalls: list[int], chunk: int, after: int) -> None:
    """With room for all: their first tokens come when half the budget has fed them, whatever is left of the
    big one; and the big one keeps the other half, so it ends in time too."""
    engine, _ = ledger_engine({FULL: 40}, chunk_tokens=chunk, max_context=1600)
    client = Client(engine)
    submit(engine, client, 1, big, 4)
    for _ in range(after):
        engine.step()
    for number, prompt in enumerate(smalls, start=2):
        submit(engine, client, number, prompt, 2)
    for _ in range(-(-sum(smalls) // (chunk // 2)) + 3):
        engine.step()
    assert all(client.tokens[number] for number in range(2, len(smalls) + 2))
    for _ in range(-(-big // (chunk // 2)) + 6):
        engine.step()
    assert_answered(client, 1, big, 4)


def test_first_come_first_fed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(prefilling: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        given = []
        for sequence in prefilling:
            given.append((sequence, min(budget, sequence.length - 1 - sequence.computed)))
            budget -= given[-1][1]
        return given

    monkeypatch.setattr(scheduler, "shares", in_order)
    with pytest.raises(AssertionError):
        small_ones_pass(1500, [20], 64, 2)


@settings(max_examples=5)
@given(
    lengths=st.lists(st.integers(30, 63), min_size=4, max_size=5),
    chunk=st.sampled_from([16, 100]),
    steps=st.integers(1, 4),
    prefix_cache=st.booleans(),
)
def test_preempted_requests_go_on_with_the_same_tokens(
    model: Model, tokenizer: Tokenizer, lengths: list[int], chunk: int, steps: int, prefix_cache: bool
) -> None:
    """Of a model, greedy and drawn, in a pool that all outgrow and in one that holds all."""
    block = 3 * 2 * 64 * 2 * 32 * 4  # bytes of a block in all three layers
    prompts = [[(7 * n + 3 * i) % VOCABULARY for i in range(length)] for n, length in enumerate(lengths)]
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=40, ignore_eos=True) for n in range(len(lengths))
    ]
    made, preemptions = [], []
    for blocks in (64, 4):
        options = EngineOptions(
            max_sequences=4,
            max_context=240,
            kv_memory=blocks * block,
            prefill_chunk=chunk,
            steps=steps,
            prefix_cache=prefix_cache,
            decode="torch",
        )
        engine = build_engine(model, tokenizer, options)
        made.append(generate(engine, prompts, params))
        preemptions.append(engine.state.preemptions)
    assert made[0] == made[1]
    assert preemptions[0] == 0 < preemptions[1]
