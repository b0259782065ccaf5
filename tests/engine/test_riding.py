"""Short pieces of prompts ride in decode rows: when, how, and with the same tokens as by chunks."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions
from headrace.engine.pace import Pace
from headrace.engine.request import FinishReason, Request
from headrace.engine.scheduler import Plan, Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.torch_backend import TorchBackend
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tests.engine.ledger import STRIDE, Client, LedgerBackend, LedgerError, ledger_engine, prompt_of
from tests.engine.north import VOCABULARY, generate, greedy, prompts
from tests.engine.test_schedules import (
    FULL,
    MAX_CONTEXT,
    assert_empty,
    play,
    pool_sizes,
    schedules,
)


class Whim(Pace):
    """Lets what is left of prompts ride, or not, as the dice fall."""

    def __init__(self, *, most: int, seed: int) -> None:
        super().__init__(most=most, gap=1e9)
        self._random = random.Random(seed)

    def rides(self, tokens: int, *, streams: int, free: int, wait: float = 0.0) -> bool:
        return free > 0 and self._random.random() < 0.4


class Untimed(Pace):
    """Learns nothing: how long the ledger takes is not what these tests are about."""

    def observe(self, **measured: float) -> None:
        return


class Always(Pace):
    """Lets all that is left ride, however long it takes."""

    def rides(self, tokens: int, *, streams: int, free: int, wait: float = 0.0) -> bool:
        return free > 0


def submit(engine: Engine, client: Client, number: int, length: int, **params: object) -> Request:
    client.tokens[number] = []
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return engine.submit(prompt_of(number, length), sampling, partial(client.sink, number))


def riding_engine(**options: object) -> tuple[Engine, LedgerBackend, Client]:
    """An engine with 16 rows a step that has answered a prompt of 200 tokens (number 1)."""
    given = {"prefix_cache": True, "riding_rows": 16, "max_context": 700} | options
    given.setdefault("pace", Untimed(most=int(given.pop("chunk_tokens", 96)), gap=1e9))  # type: ignore[call-overload]
    engine, backend = ledger_engine({FULL: 40}, **given)  # type: ignore[arg-type]
    client = Client(engine)
    submit(engine, client, 1, 200, max_tokens=1)
    while engine.step():
        pass
    backend.calls.clear()
    backend.fed = backend.rode = 0
    return engine, backend, client


def test_a_short_piece_after_a_cached_prefix_needs_no_chunk() -> None:
    """192 tokens are cached; the other 8 ride beside a stream, and the last one gives the first token."""
    engine, backend, client = riding_engine(max_steps=1)
    submit(engine, client, 2, 5, max_tokens=50)
    engine.step()
    engine.step()
    before = len(client.tokens[2])
    backend.calls.clear()
    client.reasons.pop(1)
    submit(engine, client, 1, 200, max_tokens=3)
    engine.step()
    assert backend.calls == [(9, 1)], "the stream's row, seven that feed and one that answers"
    assert client.tokens[1] == [STRIDE + 200]
    assert len(client.tokens[2]) == before + 1
    engine.step()
    assert backend.calls[1] == (2, 1)


def test_a_longer_piece_rides_in_several_steps_and_streams_go_on() -> None:
    engine, backend, client = riding_engine(pace=Always(most=96, gap=1e9), max_steps=1)
    submit(engine, client, 2, 5, max_tokens=50)
    while not client.tokens[2]:
        engine.step()
    backend.calls.clear()
    before = len(client.tokens[2])
    submit(engine, client, 3, 40, max_tokens=1)
    while not client.tokens[3]:
        engine.step()
    assert backend.calls == [(16, 1), (16, 1), (11, 1)], "15 and 15 and 9 beside a row, and one that answers"
    assert len(client.tokens[2]) == before + 3
    assert backend.fed == 0


def test_what_is_longer_than_a_step_goes_through_chunks_until_costs_are_known() -> None:
    engine, backend, client = riding_engine()
    submit(engine, client, 2, 18, max_tokens=1)  # the last token is no part of what is to be fed
    while engine.step():
        pass
    assert backend.calls == [(0, 17), (1, 1)]
    submit(engine, client, 3, 17, max_tokens=1)
    while engine.step():
        pass
    assert backend.calls[2:] == [(16, 1), (1, 1)]


def test_pieces_share_the_rows_of_a_step() -> None:
    engine, backend, client = riding_engine()
    for number, length in ((2, 6), (3, 4), (4, 6)):
        submit(engine, client, number, length, max_tokens=1)
    engine.step()
    assert backend.calls == [(16, 1)], "5, 3 and 5 that feed, and three that answer"
    assert all(client.tokens[number] for number in (2, 3, 4))


def test_with_a_chunk_under_way_anyway_short_pieces_go_along_with_it() -> None:
    engine, backend, client = riding_engine(chunk_tokens=64)
    submit(engine, client, 2, 500, max_tokens=1)
    engine.step()
    submit(engine, client, 3, 10, max_tokens=1)
    engine.step()
    assert backend.rode == 0
    assert backend.calls[:2] == [(0, 64), (0, 64)]


def test_the_rest_of_a_long_prompt_rides() -> None:
    engine, backend, client = riding_engine(chunk_tokens=64)
    submit(engine, client, 2, 140, max_tokens=1)  # 139 tokens to feed
    while engine.step():
        pass
    assert backend.calls == [(0, 64), (0, 64), (12, 1)]
    assert client.tokens[2] == [2 * STRIDE + 140]


def test_what_rode_is_cached_and_counted_once() -> None:
    engine, backend, client = riding_engine(pace=Always(most=96, gap=1e9))
    before = engine.counters.prefilled_tokens
    submit(engine, client, 2, 300, max_tokens=2)
    while engine.step():
        pass
    counters = engine.counters
    assert counters.prompt_tokens == 500
    assert counters.prefilled_tokens - before == 299
    assert counters.riding_tokens - 199 == backend.rode == 299  # the first prompt rode as well
    client.reasons.pop(2)
    again = submit(engine, client, 2, 300, max_tokens=2)
    while engine.step():
        pass
    assert again.cached_tokens == 256
    assert counters.cached_tokens == 256
    assert counters.prefilled_tokens - before == 299 + 43
    assert sum(rows * steps for rows, steps in counters.steps_by_rows.items()) == (
        counters.riding_tokens + counters.generated_tokens
    )


def test_a_cancelled_piece_gives_its_blocks_back() -> None:
    engine, backend, client = riding_engine(pace=Always(most=96, gap=1e9), prefix_cache=False)
    request = submit(engine, client, 2, 100, max_tokens=5)
    engine.step()
    engine.cancel(request)
    while engine.step():
        pass
    assert backend.calls == [(16, 1)]
    assert client.reasons[2] is FinishReason.CANCELLED
    assert_empty(engine, {FULL: 40})


@pytest.mark.parametrize("riding_rows", [0, 1])
def test_without_rows_for_them_prompts_go_through_chunks(riding_rows: int) -> None:
    engine, backend, client = riding_engine(riding_rows=riding_rows, max_sequences=1)
    submit(engine, client, 2, 10, max_tokens=1)
    while engine.step():
        pass
    assert backend.calls == [(0, 9), (1, 1)]


@settings(max_examples=150)
@given(**schedules, riding_rows=st.sampled_from([4, 5, 16, 100]), seed=st.integers(0, 1000))
def test_any_schedule_gives_every_request_its_own_tokens(
    script: list[tuple[str, int, int]],
    full: int,
    window: int | None,
    chunk: int,
    steps: int,
    riding_rows: int,
    seed: int,
    prefix_cache: bool,
) -> None:
    """Whatever arrives, leaves and is preempted, and whichever way prompts go."""
    sizes = pool_sizes(full, window, max(chunk, riding_rows))
    engine, backend = ledger_engine(
        sizes,
        window=window,
        max_steps=steps,
        max_context=MAX_CONTEXT,
        prefix_cache=prefix_cache,
        riding_rows=riding_rows,
        pace=Whim(most=chunk, seed=seed),
    )
    play(engine, script)
    assert_empty(engine, sizes)
    assert engine.counters.prefilled_tokens == backend.fed + backend.rode
    assert engine.counters.riding_tokens == backend.rode


class GetsOff(Scheduler):
    """Chooses anew in every step who rides."""

    def _riders(self, prefilling: list[Sequence], streams: int, free: int) -> list[Sequence]:
        for sequence in prefilling:
            sequence.rides = False
        return super()._riders(prefilling, streams, free)


class AnswersTwice(Scheduler):
    """Has the row after a piece decode before the piece is complete."""

    def _plan_ride(self, plan: Plan, sequence: Sequence, tokens: int, *, decode: bool) -> bool:
        return super()._plan_ride(plan, sequence, tokens, decode=decode) or bool(tokens)


class NoBlocks(Scheduler):
    """Lets rows ride that have no blocks."""

    def _reserve_chunk(self, sequence: Sequence, end: int) -> bool:
        return True


@pytest.mark.parametrize("fault", [GetsOff, AnswersTwice, NoBlocks])
def test_a_scheduler_that_lets_rows_ride_wrongly_is_noticed(fault: type[Scheduler]) -> None:
    script = [("submit", 100, 40), ("submit", 70, 40), ("step", 5, 0), ("submit", 150, 60)]
    for scheduler in (Scheduler, fault):
        engine, _ = ledger_engine(
            {FULL: 16}, max_context=MAX_CONTEXT, riding_rows=16, pace=Whim(most=10, seed=1)
        )
        engine._scheduler.__class__ = scheduler
        if scheduler is Scheduler:
            play(engine, script)
        else:
            with pytest.raises((LedgerError, IndexError)):
                play(engine, script)


def both_ways(
    model: Model,
    tokenizer: Tokenizer,
    batch: list[list[int]],
    params: list[SamplingParams],
    **options: object,
) -> list[list[int]]:
    """The tokens of the same requests, whose prompts ride or do not; they must be equal."""
    made = []
    for rides in (True, False):
        given = EngineOptions(max_context=512, **options)  # type: ignore[arg-type]
        engine = build_engine(model, tokenizer, given)
        scheduler = engine._scheduler
        scheduler.pace = Always(most=given.chunk, gap=1.0)
        if not rides:
            scheduler._riding_rows = 0
        made.append(generate(engine, batch, params))
        assert (engine.counters.riding_tokens > 0) == rides
        assert engine.counters.riding_tokens in (0, engine.counters.prefilled_tokens)
    assert made[0] == made[1]
    return made[0]


KINDS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.9, seed=1, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=9, logprobs=3),
    SamplingParams(temperature=1.0, top_k=9, presence_penalty=1.0, seed=2, max_tokens=5),
]


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    rows=st.sampled_from([2, 5, 16]),
    seed=st.integers(0, 99),
)
def test_prompts_that_ride_give_the_same_tokens(
    model: Model, tokenizer: Tokenizer, lengths: list[int], rows: int, seed: int
) -> None:
    """Of all kinds of sampling, beside each other, over blocks' ends and the window's."""
    draw = random.Random(seed)
    batch = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in [*lengths, 2]]
    params = [KINDS[index % len(KINDS)] for index in range(len(batch))]
    both_ways(model, tokenizer, batch, params, max_sequences=rows, decode="torch")


def test_prompts_that_ride_through_a_plan_give_the_same_tokens(model: Model, tokenizer: Tokenizer) -> None:
    batch = prompts(4, seed=8)
    made = both_ways(model, tokenizer, batch, KINDS, max_sequences=8, decode="oracle")
    assert [len(tokens) for tokens in made] == [6, 7, 9, 5]


def test_later_turns_that_ride_give_the_same_tokens(model: Model, tokenizer: Tokenizer) -> None:
    """Three turns of a conversation by the usual pace: what is not cached is short."""
    made, rode = [], []
    for rides in (True, False):
        engine = build_engine(model, tokenizer, EngineOptions(max_context=512, steps=3))
        if not rides:
            engine._scheduler._riding_rows = 0
        talk, answers = list(range(130)), []
        for turn in range(3):
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            answers.append(generate(engine, [talk], [params])[0])
            talk = [*talk, *answers[-1], *range(turn, turn + 9)]
        made.append(answers)
        rode.append(engine.counters.riding_tokens)
    assert made[0] == made[1]
    assert rode[0] > 0 == rode[1]


def test_prompts_to_be_scored_go_through_chunks_while_others_ride(model: Model, tokenizer: Tokenizer) -> None:
    engine = build_engine(model, tokenizer, EngineOptions(max_context=512))
    engine._scheduler.pace = Always(most=512, gap=1.0)
    score = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    short, long = [5, 6, 7, 8, 9], list(range(90))
    made = generate(engine, [long, short], [score, plain])
    assert made == [greedy(model, long, 3), greedy(model, short, 3)]
    assert engine.counters.prefilled_tokens == 89 + 4
    assert engine.counters.riding_tokens == 4


def test_backends_say_whether_they_take_several_rows(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(max_context=512, max_sequences=8)
    assert build_engine(model, tokenizer, options)._scheduler._riding_rows == 8
    monkeypatch.delattr(TorchBackend, "takes_several_rows")
    assert build_engine(model, tokenizer, options)._scheduler._riding_rows == 0
