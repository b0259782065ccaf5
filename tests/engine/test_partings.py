"""Where prompts part a tail stays, so that those after them go on there."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import prefix, scheduler
from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.blocks import BlockManager, SequenceBlocks
from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions
from headrace.engine.prefix import LEAST_SPARED, Node, PrefixCache
from headrace.engine.request import Request
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, first_visible_block
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from tests.engine.ledger import Client, LedgerBackend, LedgerError, ledger_engine
from tests.engine.north import VOCABULARY, north
from tests.engine.test_prefix import ask, prompt_of, tokens_of

FULL, SLIDING = KVGroup.FULL, KVGroup.SLIDING
WINDOW = 200
NEVER = 10**9
Rows = Seq[DecodeRow]


def roomy_engine(
    *,
    window: int | None = WINDOW,
    chunk: int = 96,
    sliding: int = 400,
    blocks: type[BlockManager] = BlockManager,
) -> tuple[Engine, LedgerBackend]:
    sizes = {FULL: 400} if window is None else {FULL: 400, SLIDING: sliding}
    return ledger_engine(
        sizes, window=window, chunk_tokens=chunk, max_context=4000, prefix_cache=True, blocks=blocks
    )


def whole(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def tails(engine: Engine) -> int:
    cache = engine._scheduler.blocks.cache
    assert cache is not None
    return sum(1 for _ in cache.held(SLIDING))


@pytest.mark.parametrize("chunk", [96, 4096])  # the second: the prompts part in the middle of a chunk
def test_the_third_session_finds_the_system_prompt(chunk: int) -> None:
    engine, backend = roomy_engine(chunk=chunk)
    client = Client(engine)
    found = [
        ask(engine, client, prompt_of(number, 2100, shared=2000)).cached_tokens for number in (1, 2, 3, 4)
    ]
    assert found == [0, 0, whole(2000), whole(2000)]
    assert backend.fed == 2 * 2099 + 2 * (2099 - whole(2000))


def test_sessions_that_begin_together_leave_it_too() -> None:
    """None of them is known to the others when it is admitted."""
    engine, _ = roomy_engine()
    client = Client(engine)
    for number in (1, 2):
        client.tokens[number] = []
        prompt = prompt_of(number, 900, shared=800)
        engine.submit(prompt, SamplingParams(max_tokens=3), partial(client.sink, number))
    while engine.step():
        pass
    assert ask(engine, client, prompt_of(3, 900, shared=800)).cached_tokens == whole(800)


def test_a_prompt_that_changes_in_the_middle_of_its_history_finds_what_is_before() -> None:
    """As aider's, which give the files as they are now between the history and the newest message.

    The history grows, so a prompt parts from the one before where that one's file began, and the next one
    finds that much; and what was there once is found even where the history was rewritten.
    """
    engine, _ = roomy_engine()
    client = Client(engine)
    histories = [700, 700, 700, 1300, 1900]
    found = [
        ask(engine, client, prompt_of(version, history + 300, shared=history)).cached_tokens
        for version, history in enumerate(histories, start=1)
    ]
    assert found == [0, 0, whole(700), whole(700), whole(700)]
    assert ask(engine, client, prompt_of(6, 2200, shared=1900)).cached_tokens == whole(1300)


@pytest.mark.parametrize(("shared", "found"), [(511, 0), (512, 512)])
def test_little_is_not_worth_a_tail(shared: int, found: int) -> None:
    assert (whole(shared) >= LEAST_SPARED) == bool(found)
    engine, _ = roomy_engine()
    client = Client(engine)
    for number in (1, 2):
        ask(engine, client, prompt_of(number, 700, shared=shared))
    assert ask(engine, client, prompt_of(3, 700, shared=shared)).cached_tokens == found


def test_little_beyond_a_tail_is_not_worth_another() -> None:
    engine, _ = roomy_engine()
    client = Client(engine)
    for number in (1, 2):
        ask(engine, client, prompt_of(number, 900, shared=600))
    ends = tails(engine)
    third = tokens_of(0, 0, 600) + tokens_of(1, 600, 800) + tokens_of(3, 800, 900)
    assert ask(engine, client, third).cached_tokens == whole(600)
    assert tails(engine) == ends + 1, "its end alone: it parted from the first one 200 tokens on"


def test_there_is_one_tail_at_a_parting_however_many_part_there() -> None:
    engine, _ = roomy_engine()
    client = Client(engine)
    kept = []
    for number in range(1, 6):
        before = tails(engine)
        ask(engine, client, prompt_of(number, 900, shared=600), answer=3)
        kept.append(tails(engine) - before)
    assert kept == [1, 2, 1, 1, 1]


@pytest.mark.parametrize("chunk", [96, 512, 700, 4096])
def test_there_are_tails_along_a_prompt_whatever_its_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """At the same places: also where chunks are longer than from one to the next, or end between them."""
    monkeypatch.setattr(scheduler, "TAIL_TOKENS", 512)
    places: list[int] = []

    class Noted(BlockManager):
        def keep_tail(self, sequence: SequenceBlocks, position: int | None = None) -> None:
            places.extend([] if position is None else [position])
            super().keep_tail(sequence, position)

    engine, _ = roomy_engine(chunk=chunk, blocks=Noted)
    client = Client(engine)
    ask(engine, client, prompt_of(1, 2000, shared=1900), answer=3)
    assert tails(engine) == 4, "at 512, 1024 and 1536, and at its end"
    assert places == [512, 1024, 1536]
    found = [ask(engine, client, prompt_of(2, 2000, shared=1300)).cached_tokens]
    assert places[3:] == [1536], "what is before the place where it went on is not looked for"
    before = tails(engine)
    found.append(ask(engine, client, prompt_of(3, 2000, shared=1000), answer=3).cached_tokens)
    assert found == [1024, 512]
    assert tails(engine) == before + 3, "at 1024 and 1536, and at its end: what it shares has them"
    engine.check()


def test_models_without_sliding_layers_need_none() -> None:
    engine, _ = roomy_engine(window=None)
    client = Client(engine)
    for number in (1, 2, 3):
        found = ask(engine, client, prompt_of(number, 900, shared=600)).cached_tokens
        assert found == (whole(600) if number > 1 else 0)
    assert tails(engine) == 0


def test_answers_that_part_leave_no_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on in the middle of two answers to one prompt."""
    engine, backend = roomy_engine()
    client = Client(engine)
    ask(engine, client, prompt_of(1, 100), answer=1000)
    ends, run = tails(engine), backend.run

    def stray(rows: Rows, steps: int, interrupt: Interrupt) -> Iterator[list[Sampled | None]]:
        for _ in run(rows, 1, interrupt):
            yield [Sampled(7 if row.position == 800 else row.token + 1, None) for row in rows]

    monkeypatch.setattr(backend, "run", stray)
    request = ask(engine, client, prompt_of(1, 100), answer=1000)
    assert request.output[701:703] == [7, 8]
    assert tails(engine) == ends + 1, "its end alone"


@pytest.mark.parametrize("used", [True, False])
def test_it_goes_like_others_when_it_was_used_least_recently(used: bool) -> None:
    engine, _ = roomy_engine(sliding=40)
    client = Client(engine)
    for number in (1, 2):
        ask(engine, client, prompt_of(number, 700, shared=600))
    for number in range(3, 13):
        ask(engine, client, prompt_of(number, 700))
        if used:
            assert ask(engine, client, prompt_of(100 + number, 700, shared=600)).cached_tokens == whole(600)
    assert ask(engine, client, prompt_of(50, 700, shared=600)).cached_tokens == used * whole(600)


def calls(monkeypatch: pytest.MonkeyPatch, least: int) -> tuple[list[tuple[int, int]], int]:
    """What each step ran while two sessions part beside a stream, and what a third finds."""
    monkeypatch.setattr(prefix, "LEAST_SPARED", least)
    engine, backend = roomy_engine()
    client = Client(engine)
    for number, length in ((9, 50), (1, 900), (2, 900)):
        client.tokens[number] = []
        prompt = prompt_of(number, length, shared=0 if number == 9 else 600)
        engine.submit(prompt, SamplingParams(max_tokens=60), partial(client.sink, number))
    while engine.step():
        pass
    ran = list(backend.calls)
    return ran, ask(engine, client, prompt_of(3, 900, shared=600)).cached_tokens


def test_steps_are_what_they_would_be_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk ends early for it or gets larger, so that nobody waits longer."""
    with_tails, found = calls(monkeypatch, LEAST_SPARED)
    without, nothing = calls(monkeypatch, NEVER)
    assert (found, nothing) == (whole(600), 0)
    assert with_tails == without
    assert max(tokens for rows, tokens in with_tails if not rows) == 96


@settings(max_examples=40)
@given(
    shared=st.integers(64, 600),
    rest=st.tuples(*[st.integers(1, 200)] * 3),
    window=st.sampled_from([1, 64, 65, 200]),
    chunk=st.sampled_from([7, 64, 96, 1000]),
    least=st.sampled_from([64, 256]),
)
def test_whatever_is_shared_is_found_by_the_third(
    shared: int, rest: tuple[int, int, int], window: int, chunk: int, least: int
) -> None:
    """Every read is checked by the ledger on the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "LEAST_SPARED", least)
        engine, _ = roomy_engine(window=window, chunk=chunk)
        client = Client(engine)
        prompts = [prompt_of(n, shared + more, shared=shared) for n, more in enumerate(rest, start=1)]
        found = [ask(engine, client, prompt).cached_tokens for prompt in prompts]
    if whole(shared) >= least and all(whole(shared + more - 1) > whole(shared) for more in rest[:2]):
        assert found[2] >= whole(shared)
    assert found[2] <= whole(shared)


class KeepsTooLittle(BlockManager):
    """Leaves, where prompts part, the window of one block before."""

    def keep_parting(self, sequence: SequenceBlocks, node: Node) -> None:
        assert self.cache is not None
        first = first_visible_block(node.depth * BLOCK_TOKENS, self.window)
        self.cache.keep_tail(node, sequence.tables[SLIDING][first - 1 : node.depth - 1])


def test_a_wrong_tail_is_noticed() -> None:
    engine, _ = roomy_engine(blocks=KeepsTooLittle, chunk=4096)
    client = Client(engine)
    for number in (1, 2):
        ask(engine, client, prompt_of(number, 900, shared=600))
    with pytest.raises(LedgerError):
        ask(engine, client, prompt_of(3, 900, shared=600))


def found_after_a_failure() -> int:
    """What a third session finds if the second, from which the tail is, turned out to be unusable."""
    engine, _ = roomy_engine()
    client = Client(engine)
    ask(engine, client, prompt_of(1, 900, shared=600))
    failing = engine.submit(prompt_of(2, 900, shared=600), SamplingParams(max_tokens=50), lambda _: None)
    while not failing.output:
        engine.step()
    [sequence] = engine._scheduler.running
    sequence.unusable = True
    engine.cancel(failing)
    engine.step()
    engine.check()
    return ask(engine, client, prompt_of(3, 900, shared=600)).cached_tokens


def test_a_failed_request_takes_its_tails_with_it() -> None:
    """The blocks of the full layers are the first session's; those of the tail may be no numbers."""
    assert found_after_a_failure() == 0


def test_a_tail_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "forget_tail", lambda *_: None)
    assert found_after_a_failure() == whole(600)


def served(engine: Engine, prompt: list[int]) -> tuple[Request, list[int]]:
    request = engine.submit(
        prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), lambda _: None
    )
    while engine.step():
        pass
    engine.check()
    return request, request.output


def test_a_model_says_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts that part after 300 tokens, the window of 70 crossed on the way."""
    monkeypatch.setattr(prefix, "LEAST_SPARED", 128)
    model, tokenizer = synthetic_model(north(), seed=3), Tokenizer.synthetic(VOCABULARY)
    prompts = [
        [(5 * i + i * i // 7 + (n * i if i >= 300 else 0)) % VOCABULARY for i in range(400)]
        for n in range(1, 5)
    ]
    said, found = [], []
    for cached in (True, False):
        options = EngineOptions(max_context=800, prefix_cache=cached, max_sequences=2)
        engine = build_engine(model, tokenizer, options)
        answers = [served(engine, prompt) for prompt in prompts]
        said.append([answer for _, answer in answers])
        found.append([request.cached_tokens for request, _ in answers])
    assert found == [[0, 0, 256, 256], [0, 0, 0, 0]]
    assert said[0] == said[1]
    assert len({tuple(answer) for answer in said[0]}) > 1
