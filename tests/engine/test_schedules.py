"""Random schedules: whatever arrives and leaves, no block leaks, is used twice or read stale."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.blocks import BlockManager, SequenceBlocks
from headrace.engine.engine import Engine
from headrace.engine.request import FinishReason, Request
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import STRIDE, Client, LedgerError, ledger_engine, prompt_of

MAX_CONTEXT = 320
FULL, SLIDING = KVGroup.FULL, KVGroup.SLIDING

lengths = st.integers(1, MAX_CONTEXT - 1)
actions = st.one_of(
    st.tuples(st.just("submit"), lengths, st.integers(1, 200)),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
)

schedules: dict[str, Any] = {
    "script": st.lists(actions, max_size=40),
    "full": st.integers(5, 24),
    "window": st.sampled_from([None, 1, 63, 64, 65, 100, 200]),
    "chunk": st.sampled_from([1, 7, 64, 96, 512]),
    "steps": st.integers(1, 6),
    "prefix_cache": st.booleans(),
}


def pool_sizes(full: int, window: int | None, most: int) -> dict[KVGroup, int]:
    """Blocks for four sequences within the window, and for `most` tokens of prompts in a call."""
    if window is None:
        return {FULL: full}
    return {FULL: full, SLIDING: min(full, 4 * (-(-window // 64) + 3) + -(-most // 64) + 1)}


def play(engine: Engine, script: list[tuple[str, int, int]]) -> Client:
    """Do what the script says, then step until all has ended, and compare with what must come out."""
    client = Client(engine)
    requests: list[Request] = []
    wanted: list[int] = []
    cancelled: set[int] = set()
    for action, first, second in script:
        if action == "submit":
            number = len(requests) + 1
            client.tokens[number] = []
            most = min(second, MAX_CONTEXT - first)
            requests.append(
                engine.submit(
                    prompt_of(number, first),
                    SamplingParams(max_tokens=most),
                    partial(client.sink, number),
                )
            )
            wanted.append(most)
        elif action == "cancel" and requests:
            cancelled.add(first % len(requests) + 1)
            engine.cancel(requests[first % len(requests)])
        elif action == "step":
            for _ in range(first):
                engine.step()
                engine.check()
    for _ in range(20_000):
        if not engine.step():
            break
    else:
        raise AssertionError("the engine never came to rest")
    engine.check()
    for number, (request, most) in enumerate(zip(requests, wanted, strict=True), start=1):
        start = number * STRIDE + len(request.prompt)
        tokens = client.tokens[number]
        assert tokens == list(range(start, start + len(tokens)))
        if client.reasons[number] is FinishReason.LENGTH:
            assert len(tokens) == most
        else:
            assert client.reasons[number] is FinishReason.CANCELLED
            assert number in cancelled
    return client


def assert_empty(engine: Engine, sizes: dict[KVGroup, int]) -> None:
    engine.check()
    blocks = engine._scheduler.blocks
    assert {group: pool.free + blocks.cached(group) for group, pool in blocks.pools.items()} == sizes
    assert engine.state.running == engine.state.waiting == 0


@settings(max_examples=120)
@given(**schedules)
def test_any_schedule_gives_every_request_its_own_tokens(
    script: list[tuple[str, int, int]],
    full: int,
    window: int | None,
    chunk: int,
    steps: int,
    prefix_cache: bool,
) -> None:
    sizes = pool_sizes(full, window, chunk)
    engine, _ = ledger_engine(
        sizes,
        window=window,
        chunk_tokens=chunk,
        max_steps=steps,
        max_context=MAX_CONTEXT,
        prefix_cache=prefix_cache,
    )
    play(engine, script)
    assert_empty(engine, sizes)


class TrimsTooMuch(BlockManager):
    """Takes the window for one block shorter than it is."""

    def trim(self, sequence: SequenceBlocks, position: int) -> None:
        super().trim(sequence, position + 64)


class Leaks(BlockManager):
    """Forgets the last block of a sequence that ends."""

    def release(self, sequence: SequenceBlocks) -> None:
        for table in sequence.tables.values():
            if table:
                table.pop()
        super().release(sequence)


class NeverTrims(BlockManager):
    """Keeps what has left the window."""

    def trim(self, sequence: SequenceBlocks, position: int) -> None:
        return


class HandsOutTwice(BlockManager):
    """Frees blocks while the sequence still uses them."""

    def grow(self, sequence: SequenceBlocks, tokens: int) -> bool:
        grown = super().grow(sequence, tokens)
        if grown and len(sequence.tables[FULL]) > 1:
            self.pools[FULL].release(sequence.tables[FULL][0])
        return grown


@pytest.mark.parametrize(
    ("fault", "error"),
    [(TrimsTooMuch, LedgerError), (Leaks, RuntimeError), (HandsOutTwice, (LedgerError, RuntimeError))],
)
def test_a_broken_block_manager_is_noticed(
    fault: type[BlockManager], error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    engine, _ = ledger_engine({FULL: 12, SLIDING: 12}, window=100, max_context=MAX_CONTEXT, blocks=fault)
    script = [("submit", 150, 100), ("submit", 90, 100), ("step", 5, 0), ("submit", 150, 60)]
    with pytest.raises(error):
        play(engine, script)


def test_sliding_layers_keep_no_more_than_their_window() -> None:
    """With a pool of one window a long sequence can only run if blocks are given back on the way."""
    sizes = {FULL: 8, SLIDING: 4}
    engine, _ = ledger_engine(sizes, window=64, chunk_tokens=64, max_context=512)
    client = Client(engine)
    client.tokens[1] = []
    engine.submit(prompt_of(1, 200), SamplingParams(max_tokens=300), partial(client.sink, 1))
    while engine.step():
        pass
    assert len(client.tokens[1]) == 300
    assert_empty(engine, sizes)
    stuck, _ = ledger_engine(sizes, window=64, chunk_tokens=64, max_context=512, blocks=NeverTrims)
    client = Client(stuck)
    client.tokens[1] = []
    stuck.submit(prompt_of(1, 200), SamplingParams(max_tokens=300), partial(client.sink, 1))
    for _ in range(400):
        stuck.step()
    assert not client.reasons


def test_a_sequence_preempted_by_its_own_growth_starts_over() -> None:
    """It may come back at once, but not in the step in which it lost its blocks."""
    engine, _ = ledger_engine({FULL: 8, SLIDING: 3}, window=64, chunk_tokens=64, blocks=NeverTrims)
    client = Client(engine)
    client.tokens[1] = []
    engine.submit(prompt_of(1, 20), SamplingParams(max_tokens=300), partial(client.sink, 1))
    for _ in range(400):
        engine.step()
    assert engine.state.preemptions > 0


def test_preemption_loses_nothing() -> None:
    """Three sequences that cannot all fit: some are preempted, all get their tokens."""
    sizes = {FULL: 6}
    engine, _ = ledger_engine(sizes, max_context=MAX_CONTEXT)
    play(engine, [("submit", 60, 200), ("submit", 60, 200), ("submit", 60, 200)])
    assert engine.state.preemptions > 0
    assert_empty(engine, sizes)
