"""The prefix cache: what is found again, what it costs in the pools, and what makes way for what."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.engine import prefix
from headrace.engine.blocks import BlockManager
from headrace.engine.engine import Engine
from headrace.engine.request import FinishReason, Request
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import STRIDE, Client, LedgerBackend, LedgerError, ledger_engine

FULL, SLIDING = KVGroup.FULL, KVGroup.SLIDING
WINDOW = 100


def tokens_of(number: int, start: int, end: int) -> list[int]:
    return [number * STRIDE + position for position in range(start, end)]


def prompt_of(number: int, length: int, *, shared: int = 0) -> list[int]:
    """A prompt whose first `shared` tokens (a system prompt, say) are the same for all numbers."""
    return tokens_of(0, 0, min(shared, length)) + tokens_of(number, min(shared, length), length)


def ask(engine: Engine, client: Client, prompt: list[int], *, answer: int = 10) -> Request:
    """Run one request to its end."""
    number = len(client.tokens) + 1
    client.tokens[number] = []
    params = SamplingParams(max_tokens=answer)
    request = engine.submit(prompt, params, partial(client.sink, number))
    while engine.step():
        pass
    assert client.reasons[number] is FinishReason.LENGTH
    engine.check()
    return request


def cached_engine(
    *, window: int | None = WINDOW, full: int = 64, sliding: int = 64, max_sequences: int = 4
) -> tuple[Engine, LedgerBackend]:
    sizes = {FULL: full} if window is None else {FULL: full, SLIDING: sliding}
    return ledger_engine(
        sizes, window=window, max_context=1500, max_sequences=max_sequences, prefix_cache=True
    )


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_second_turn_does_not_pay_for_the_first(window: int | None) -> None:
    engine, backend = cached_engine(window=window)
    client = Client(engine)
    first = ask(engine, client, prompt_of(1, 500), answer=100)
    assert first.cached_tokens == 0
    fed = backend.fed
    second = ask(engine, client, prompt_of(1, 700))
    assert second.cached_tokens == 599 // 64 * 64, "the turn's end: its last token has no KV"
    assert backend.fed - fed == 699 - second.cached_tokens


def test_another_answer_to_the_same_prompt_goes_on_at_its_end() -> None:
    """The client sends the turn back in other words: the tail kept at the prompt's end still serves."""
    engine, _ = cached_engine()
    client = Client(engine)
    ask(engine, client, prompt_of(1, 500), answer=200)
    other = prompt_of(1, 500) + tokens_of(2, 500, 700)
    assert ask(engine, client, other).cached_tokens == 499 // 64 * 64


def test_the_whole_prompt_again_leaves_a_token_to_feed() -> None:
    engine, _ = cached_engine()
    client = Client(engine)
    ask(engine, client, prompt_of(1, 64 * 5))
    assert ask(engine, client, prompt_of(1, 64 * 5)).cached_tokens == 64 * 4


def test_sliding_layers_cannot_go_on_where_no_tail_was_kept() -> None:
    """A shared system prompt is known, but its middle has no tail: without sliding layers it would serve."""
    for window, expected in ((None, 256), (WINDOW, 0)):
        engine, _ = cached_engine(window=window)
        client = Client(engine)
        ask(engine, client, prompt_of(1, 600, shared=256))
        assert ask(engine, client, prompt_of(2, 600, shared=256)).cached_tokens == expected


def test_long_prompts_leave_tails_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.scheduler.TAIL_TOKENS", 256)
    engine, _ = cached_engine()
    client = Client(engine)
    ask(engine, client, prompt_of(1, 1000, shared=600))
    cached = ask(engine, client, prompt_of(2, 1000, shared=600)).cached_tokens
    assert 256 <= cached <= 600


def test_the_cache_makes_way_for_sequences() -> None:
    """A pool full of old turns serves new prompts of any size that the pool can hold."""
    engine, _ = cached_engine(full=24, sliding=24)
    client = Client(engine)
    for number in range(1, 9):
        ask(engine, client, prompt_of(number, 400))
    assert engine.state.preemptions == 0
    ask(engine, client, prompt_of(9, 1400))
    assert ask(engine, client, prompt_of(8, 400)).cached_tokens == 0, "all of it was needed"


@pytest.mark.parametrize("length", [300, 30])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_what_the_cache_notes_of_uses_does_not_grow_with_them(window: int | None, length: int) -> None:
    """A prompt that comes again and again, or many of less than a block, never fill the pool."""
    sizes = {FULL: 16} if window is None else {FULL: 16, SLIDING: 16}
    manager = BlockManager(sizes, window=window, prefix_cache=True)
    tokens = prompt_of(1, length)
    for _ in range(2000):
        sequence = manager.new_sequence()
        manager.adopt(sequence, tokens)
        assert manager.grow(sequence, length)
        manager.remember(sequence, lambda start, end: tokens[start:end], length)
        manager.keep_tail(sequence)
        manager.release(sequence)
    cache = manager.cache
    assert cache is not None
    assert max(len(cache._nodes), len(cache._tails)) < 1500
    assert cache.match(tokens)[0].depth == (length - 1) // 64


def test_what_was_used_least_recently_goes_first() -> None:
    engine, _ = cached_engine(full=24, sliding=40)
    client = Client(engine)
    ask(engine, client, prompt_of(1, 450))
    ask(engine, client, prompt_of(2, 450))
    ask(engine, client, prompt_of(1, 460))
    ask(engine, client, prompt_of(3, 700))
    assert ask(engine, client, prompt_of(1, 470)).cached_tokens > 0
    assert ask(engine, client, prompt_of(2, 470)).cached_tokens == 0


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_round_robin_of_sessions_keeps_hitting(window: int | None) -> None:
    """32 agent sessions taking turns at about a quarter of the pool, the case that breaks other engines."""
    sessions, turns, growth = 32, 5, 130
    last = 200 + growth * turns
    blocks = 4 * sessions * (last // 64)
    engine, backend = cached_engine(window=window, full=blocks, sliding=blocks, max_sequences=16)
    client = Client(engine)
    for number in range(1, sessions + 1):
        ask(engine, client, prompt_of(number, 200), answer=20)
    backend.fed = 0
    asked = cached = known = 0
    for turn in range(1, turns + 1):
        for number in range(1, sessions + 1):
            length = 200 + growth * turn
            request = ask(engine, client, prompt_of(number, length), answer=20)
            asked += 1
            cached += request.cached_tokens >= length - growth - 64
            known += request.cached_tokens
    assert cached / asked > 0.95
    assert known > 0.5 * (known + backend.fed)


@settings(max_examples=60)
@given(
    turns=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([0, 64, 100, 128, 300]), st.integers(1, 700)),
        min_size=1,
        max_size=14,
    ),
    full=st.integers(13, 40),
    window=st.sampled_from([None, 1, 64, 65, 200]),
    together=st.integers(1, 3),
    least=st.sampled_from([64, 128, 512]),
)
@example(  # whose last but one had blocks of its own for what the cache knew, and then no room to go on
    turns=[(4, 100, 700), (4, 64, 700), (4, 100, 325), (4, 100, 700), (4, 64, 620)],
    full=13,
    window=65,
    together=2,
    least=64,
)
def test_shared_prefixes_never_give_a_wrong_block(
    turns: list[tuple[int, int, int]], full: int, window: int | None, together: int, least: int
) -> None:
    """Any conversations, branching anywhere, several at a time, in a pool that is always short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "LEAST_SPARED", least)
        converse(turns, full, window, together)


def converse(turns: list[tuple[int, int, int]], full: int, window: int | None, together: int) -> None:
    """Turns of (conversation, tokens that it shares with all, length), so many at a time."""
    engine, _ = cached_engine(window=window, full=full, sliding=min(full, 16))
    client = Client(engine)
    for start in range(0, len(turns), together):
        for number, (conversation, shared, length) in enumerate(turns[start : start + together], start=start):
            client.tokens[number] = []
            prompt = prompt_of(conversation, length, shared=min(shared, length - 1))
            engine.submit(prompt, SamplingParams(max_tokens=20), partial(client.sink, number))
        while engine.step():
            pass
        engine.check()
    assert set(client.reasons.values()) == {FinishReason.LENGTH}


class KeepsWrongTails(BlockManager):
    """Lets others go on one block further than the tail reaches."""

    def keep_tail(self, sequence: object, position: int | None = None) -> None:
        node = sequence.node  # type: ignore[attr-defined]
        if self.cache is not None and node is not None and node.depth > 3:
            self.cache.keep_tail(node, sequence.tables[SLIDING][node.depth - 3 : node.depth - 1])  # type: ignore[attr-defined]


def test_a_wrong_tail_is_noticed() -> None:
    engine, _ = ledger_engine(
        {FULL: 64, SLIDING: 64}, window=WINDOW, max_context=1500, prefix_cache=True, blocks=KeepsWrongTails
    )
    client = Client(engine)
    ask(engine, client, prompt_of(1, 500))
    with pytest.raises(LedgerError):
        ask(engine, client, prompt_of(1, 700))


def test_the_log_says_where_a_long_prompt_left_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = cached_engine()
    client = Client(engine)
    ask(engine, client, prompt_of(1, 1200))
    changed = prompt_of(1, 1200)
    changed[70] = 7
    with caplog.at_level(logging.INFO):
        ask(engine, client, changed)
    assert (
        f"parts from an earlier prompt at token 70, where it has 7 and that one {STRIDE + 70}" in caplog.text
    )
