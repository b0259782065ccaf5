"""Many agent sessions in turn over North's own geometry and the pool that the engine sizes for it.

32 sessions use a quarter of the pool. That is the case in which caches that keep window blocks like any
others lose everything: each session comes back after the blocks of all others have passed.
"""

from __future__ import annotations

import bisect
import random
from typing import cast

import pytest
import torch

from headrace.engine import prefix
from headrace.engine.blocks import BlockManager, SequenceBlocks
from headrace.engine.build import assemble_engine, size_pool
from headrace.engine.engine import Engine
from headrace.engine.null_backend import NullBackend
from headrace.engine.options import EngineOptions
from headrace.engine.request import Request
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import preset
from headrace.model.tokenizer import Tokenizer
from tests.engine.ledger import SilentTokenizer

SESSIONS, TURNS, GROWTH, ANSWER = 32, 3, 600, 20
NORTH = preset("north-mini-code")
OPTIONS = EngineOptions(max_sequences=16)


def pool_of(full: int) -> dict[KVGroup, int]:
    """The pool with at least `full` blocks of the full layers, as the engine sizes it."""

    def blocks(mebibytes: int) -> int:
        sizes, _ = size_pool(NORTH, OPTIONS, available=mebibytes * 2**20, dtype=torch.bfloat16)
        return sizes[KVGroup.FULL]

    memory = bisect.bisect_left(range(1, 2**18), full, lo=2**10, key=blocks) + 1
    return size_pool(NORTH, OPTIONS, available=memory * 2**20, dtype=torch.bfloat16)[0]


def ask(engine: Engine, session: int, length: int, *, shared: int = 0) -> Request:
    """A turn: the session's first `length` tokens, as if the answers before had been among them.

    All sessions have the first `shared` of them.
    """
    everyone, own = random.Random(-1), random.Random(session)
    prompt = [everyone.randrange(NORTH.vocab_size) for _ in range(shared)]
    prompt += [own.randrange(NORTH.vocab_size) for _ in range(length - shared)]
    request = engine.submit(prompt, SamplingParams(max_tokens=ANSWER), lambda _: None)
    while engine.step():
        pass
    return request


def rates(length: int, *, shared: int = 0) -> tuple[float, float]:
    """What was found of all tokens of the prompts, and of those that had been seen in the turn before."""
    full = 4 * SESSIONS * (length + TURNS * GROWTH) // BLOCK_TOKENS
    backend = NullBackend(vocab_size=NORTH.vocab_size, max_rows=16, max_steps=16)
    engine = assemble_engine(
        backend=backend,
        prefiller=backend,
        tokenizer=cast(Tokenizer, SilentTokenizer()),
        config=NORTH,
        sizes=pool_of(full),
        max_context=length + (TURNS + 1) * GROWTH,
        options=OPTIONS,
    )
    for session in range(SESSIONS):
        ask(engine, session, length, shared=shared)
    hits = queries = seen = 0
    for turn in range(1, TURNS + 1):
        for session in range(SESSIONS):
            prompt = length + turn * GROWTH
            hits += ask(engine, session, prompt, shared=shared).cached_tokens
            queries += prompt
            seen += prompt - GROWTH
    engine.check()
    return hits / queries, hits / seen


def test_sessions_keep_what_they_had() -> None:
    """Measured: 96.4 % of all tokens, 99.9 % of those seen before."""
    of_all, of_seen = rates(16_000)
    assert of_all > 0.95
    assert of_seen > 0.99


@pytest.mark.parametrize("length", [2_000, 5_000])
def test_short_sessions_too(length: int) -> None:
    """Their windows are most of them, so that the sliding pool is what is short."""
    assert rates(length)[1] > 0.95


@pytest.mark.parametrize(("length", "shared"), [(5_000, 2_000), (16_000, 9_000)])
def test_tails_where_sessions_part_take_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch, length: int, shared: int
) -> None:
    with_them = rates(length, shared=shared)
    monkeypatch.setattr(prefix, "LEAST_SPARED", 10**9)
    without = rates(length, shared=shared)
    assert with_them[1] > 0.95
    assert with_them >= without


def test_without_tails_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_none(self: BlockManager, sequence: SequenceBlocks) -> None:
        return None

    monkeypatch.setattr(BlockManager, "keep_tail", keep_none)
    assert rates(2_000) == (0.0, 0.0)
