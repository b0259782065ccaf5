"""How large the KV pool is made: within its memory, no smaller than it could be, and enough to get done."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from headrace.engine import build
from headrace.engine.build import pool_tokens, size_pool
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.request import FinishReason
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import BLOCK_TOKENS, block_bytes
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import Client, ledger_engine, prompt_of
from tests.engine.north import north

FULL, SLIDING = KVGroup.FULL, KVGroup.SLIDING
MOST_STEPS = 10_000  # six requests of 768 tokens one after the other, each begun twice, take fewer


def taken(config: ModelConfig, sizes: dict[KVGroup, int]) -> int:
    """Bytes of a pool in float32."""
    return sum(count * block_bytes(config, group, 4) for group, count in sizes.items())


def sized(config: ModelConfig, options: EngineOptions, blocks: float) -> tuple[dict[KVGroup, int], int]:
    """The pool for the memory of so many blocks of both groups."""
    budget = int(blocks * sum(block_bytes(config, group, 4) for group in KVGroup))
    sizes, context = size_pool(config, options, available=budget, dtype=torch.float32)
    assert taken(config, sizes) <= budget
    return sizes, context


def comes_to_its_end(
    config: ModelConfig, options: EngineOptions, sizes: dict[KVGroup, int], context: int
) -> bool:
    """Whether twice as many requests as may run, all as long as the context, are answered from a pool."""
    engine, _ = ledger_engine(
        sizes,
        window=config.window,
        max_sequences=options.max_sequences,
        chunk_tokens=options.chunk,
        max_steps=options.steps,
        max_context=context,
        prefix_cache=options.prefix_cache,
    )
    client = Client(engine)
    for number in range(1, 2 * options.max_sequences + 1):
        client.tokens[number] = []
        prompt = prompt_of(number, 1 + (number * context // 3) % (context - 1))
        params = SamplingParams(max_tokens=context - len(prompt))
        engine.submit(prompt, params, partial(client.sink, number))
    for _ in range(MOST_STEPS):
        if not engine.step():
            engine.check()
            return set(client.reasons.values()) == {FinishReason.LENGTH}
    return False


@settings(max_examples=25)
@given(
    window=st.sampled_from([1, 63, 64, 65, 128]),
    blocks=st.floats(1, 14),
    max_sequences=st.integers(1, 3),
    max_context=st.sampled_from([2, 65, 200, None]),
    chunk=st.sampled_from([5, 64, 200]),
    steps=st.sampled_from([1, 16, 70]),
    prefix_cache=st.booleans(),
)
@example(window=1, blocks=12, max_sequences=3, max_context=None, chunk=5, steps=1, prefix_cache=False)
def test_a_pool_of_any_size_gets_every_request_done(
    window: int,
    blocks: float,
    max_sequences: int,
    max_context: int | None,
    chunk: int,
    steps: int,
    prefix_cache: bool,
) -> None:
    config = north(window)
    options = EngineOptions(
        max_sequences=max_sequences,
        max_context=max_context,
        prefill_chunk=chunk,
        steps=steps,
        prefix_cache=prefix_cache,
    )
    try:
        sizes, context = sized(config, options, blocks)
    except OptionError:  # there is no room for one sequence
        assume(False)
    assert comes_to_its_end(config, options, sizes, context)


def test_a_sliding_pool_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window and the second chunk need four blocks: with three, it never begins."""
    options = EngineOptions(max_sequences=1, prefill_chunk=100, steps=1, prefix_cache=False)
    config = north(128)
    sizes, context = sized(config, options, 5)
    assert comes_to_its_end(config, options, sizes, context)
    monkeypatch.setattr(build, "_sliding_blocks", lambda config, options, full: 3)
    sizes, context = sized(config, options, 5)
    assert not comes_to_its_end(config, options, sizes, context)


def test_memory_is_used_up_but_not_beyond_use() -> None:
    config, options = north(), EngineOptions(max_sequences=2, prefix_cache=False)
    sizes, context = sized(config, options, 9)
    assert taken(config, sizes | {FULL: sizes[FULL] + 1}) > 9 * sum(
        block_bytes(config, g, 4) for g in KVGroup
    )
    assert context == pool_tokens(sizes) == sizes[FULL] * BLOCK_TOKENS
    sizes, context = sized(config, options, 10_000)
    assert context == config.max_positions
    assert pool_tokens(sizes) == 2 * config.max_positions, "nobody can use more"
    sizes, _ = sized(config, EngineOptions(max_sequences=2, prefix_cache=True), 10_000)
    assert pool_tokens(sizes) == 4 * config.max_positions, "as much again for what is cached"


def test_what_cannot_be_is_refused() -> None:
    config = north()
    with pytest.raises(
        OptionError,
        match=r"is \d+ MiB here, which hold 64 tokens of KV, but 128 need .* give more memory or a smaller",
    ):
        sized(config, EngineOptions(), 1.5)
    with pytest.raises(OptionError, match="max_context: is 1025, but the model was made for at most 1024"):
        sized(config, EngineOptions(max_context=1025), 100)
