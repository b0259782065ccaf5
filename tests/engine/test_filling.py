"""Chunks whose layers are run in several steps: how long answers wait meanwhile, and what is written."""

from __future__ import annotations

import itertools
import random
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.filling import Filling
from headrace.engine.options import EngineOptions
from headrace.engine.pace import Pace
from headrace.engine.request import FinishReason, Output
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.torch_backend import TorchBackend
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import KVCache
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.pack import pack_model
from headrace.step.packed_model import packed_model
from tests.engine.ledger import (
    STRIDE,
    Client,
    LayeredLedger,
    LedgerBackend,
    LedgerError,
    ledger_engine,
    prompt_of,
)
from tests.engine.north import VOCABULARY, generate, prompts
from tests.engine.simulated import (
    Machine,
    Restless,
    Uneven,
    busy_machine,
    gaps_beside_a_long_prompt,
    machine,
    percentile_99,
)
from tests.engine.test_riding import Whim
from tests.engine.test_schedules import FULL, MAX_CONTEXT, SLIDING, actions, assert_empty, play
from tests.engine.test_torch_backend import rows_of

OPERATIONS = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"


class Slow(Whim):
    """Runs any number of a chunk's layers in a step, and lets pieces ride as the dice fall."""

    def layers(self, filling: Filling, *, rows: int) -> int:
        return self._random.randint(1, filling.left)


def submit(engine: Engine, client: Client, number: int, length: int, **params: object) -> None:
    client.tokens[number] = []
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    engine.submit(prompt_of(number, length), sampling, partial(client.sink, number))


@settings(max_examples=150)
@given(
    script=st.lists(actions, max_size=40),
    full=st.integers(5, 24),
    window=st.sampled_from([None, 1, 63, 64, 65, 100, 200]),
    chunk=st.sampled_from([1, 7, 64, 96, 512]),
    steps=st.integers(1, 6),
    riding_rows=st.sampled_from([0, 5, 16]),
    seed=st.integers(0, 1000),
    prefix_cache=st.booleans(),
)
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
    """Whatever arrives, leaves and is preempted while a pass is under way."""
    sizes = {FULL: full}
    if window is not None:
        sizes[SLIDING] = min(full, 4 * (-(-window // 64) + 3) + -(-max(chunk, riding_rows) // 64) + 1)
    engine, backend = ledger_engine(
        sizes,
        window=window,
        max_steps=steps,
        max_context=MAX_CONTEXT,
        prefix_cache=prefix_cache,
        riding_rows=riding_rows,
        pace=Slow(most=chunk, seed=seed),
        ledger=LayeredLedger,
    )
    play(engine, script)
    assert_empty(engine, sizes)
    assert engine.counters.prefilled_tokens == backend.fed + backend.rode


class GoesOn(Scheduler):
    """Finishes a pass though one of its sequences has lost its blocks."""

    def _leave(self, sequence: Sequence) -> None:
        kept = self.filling
        super()._leave(sequence)
        self.filling = kept


def test_a_pass_that_goes_on_without_its_blocks_is_noticed() -> None:
    script = [("submit", 200, 50), ("step", 2, 0), ("cancel", 0, 0), ("submit", 190, 20)]
    for scheduler in (Scheduler, GoesOn):
        engine, _ = ledger_engine(
            {FULL: 8}, max_context=MAX_CONTEXT, pace=Slow(most=512, seed=2), ledger=LayeredLedger
        )
        engine._scheduler.__class__ = scheduler
        if scheduler is Scheduler:
            play(engine, script)
        else:
            with pytest.raises((LedgerError, IndexError)):
                play(engine, script)


class OneByOne(Pace):
    """Runs one layer before a step that has rows."""

    def layers(self, filling: Filling, *, rows: int) -> int:
        return 1 if rows else filling.left


def test_a_decode_step_follows_every_part_of_a_chunk() -> None:
    engine, backend = ledger_engine(
        {FULL: 16}, max_context=700, pace=OneByOne(most=512, gap=1e9), ledger=LayeredLedger, max_steps=1
    )
    client = Client(engine)
    submit(engine, client, 1, 5, max_tokens=100)
    while len(client.tokens[1]) < 5:
        engine.step()
    backend.calls.clear()
    submit(engine, client, 2, 65, max_tokens=5)
    while not client.tokens[2]:
        engine.step()
    assert backend.calls == [(0, 64), (1, 1)] * 5 + [(2, 1)]
    assert engine.counters.prefilled_tokens == backend.fed == 4 + 64


def riding_past(max_tokens: int, length: int) -> tuple[Engine, Client, LedgerBackend]:
    """A stream of so many tokens, a long prompt whose pass is under way, and one of `length` behind it."""
    engine, backend = ledger_engine(
        {FULL: 16},
        max_context=700,
        pace=OneByOne(most=512, gap=1e9),
        ledger=LayeredLedger,
        max_steps=1,
        riding_rows=16,
    )
    client = Client(engine)
    submit(engine, client, 1, 5, max_tokens=max_tokens)
    engine.step()
    submit(engine, client, 2, 300, max_tokens=5)
    engine.step()
    backend.calls.clear()
    submit(engine, client, 3, length, max_tokens=5)
    engine.step()
    return engine, client, backend


def test_short_pieces_ride_past_a_pass_that_is_under_way() -> None:
    _, client, backend = riding_past(100, 10)
    assert backend.calls == [(0, 64), (11, 1)]
    assert client.tokens[3] == [3 * STRIDE + 10]
    assert not client.tokens[2]


def test_a_pass_stops_for_rows_that_only_feed() -> None:
    engine, client, backend = riding_past(2, 17)
    assert client.reasons[1] is FinishReason.LENGTH
    assert backend.calls == [(0, 64), (16, 1)]
    assert engine._scheduler.filling is not None
    engine.step()
    assert client.tokens[3] == [3 * STRIDE + 17]
    assert not client.tokens[2]


@pytest.mark.parametrize(("streams", "share"), [(1, 0.75), (4, 0.8), (12, 1.0)])
def test_no_gap_is_longer_than_the_bound_and_the_prompt_takes_less(
    monkeypatch: pytest.MonkeyPatch, streams: int, share: float
) -> None:
    layered, soon = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=streams)
    whole, late = gaps_beside_a_long_prompt(monkeypatch, layered=False, streams=streams)
    assert max(layered[5:]) < 0.0405, "the first chunks tell what they cost"
    assert max(whole) > 0.07, "a chunk's own cost and as much for its tokens"
    assert soon < share * late


@pytest.mark.parametrize(
    "accidents",
    [
        {1: 3.0},
        {3: 3.0},
        {4: 3.0},
        {4: 3.0, 5: 0.134, 6: 0.2, 7: 0.268, 8: 0.2, 10: 0.134, 12: 0.067},
    ],
    ids=str,
)
def test_accidents_cost_what_they_take_and_not_much_more(
    monkeypatch: pytest.MonkeyPatch, accidents: dict[int, float]
) -> None:
    """As where a GPU loads a library, or plans for the first of a shape: no small chunks follow for ever."""
    _, plain = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=4)
    monkeypatch.setattr(Machine, "accidents", accidents)
    gaps, seconds = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=4)
    late = sum(accidents.values())
    assert 0.95 * plain + late < seconds < 1.25 * plain + late
    assert sum(gap > 0.06 for gap in gaps) <= len(accidents) + 1


def form(line: str) -> str:
    """A line of the log but for its numbers."""
    return re.sub(r"[\d.]*\d", "N", " ".join(line.split()))


def test_the_log_tells_of_every_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "headrace.engine.engine"):
        gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=4)
    lines = [line for line in caplog.text.splitlines() if "prompt: " in line][1:]  # but for the streams' own
    found = [
        re.search(r"(\d+) tokens from (\d+) on, (\d+) layers in ([\d.]+) ms, (\d+) left", x) for x in lines
    ]
    tokens = layers = 0
    for part in found:
        assert part is not None
        count, start, ran, milliseconds, left = (float(number) for number in part.groups())
        assert milliseconds == pytest.approx((36 + 0.022 * count) * ran / 48, abs=0.06)
        layers += int(ran)
        assert (layers + left) % 48 == 0
        if not left:
            assert start == tokens
            tokens += int(count)
    assert 99_000 < tokens < 100_000, "the last chunk's end and the last token are fed otherwise"
    between = [re.search(r"; ([\d.]+) ms since those before", line) for line in lines]
    assert {match[1] for match in between if match} <= {"0.0", "5.0"}
    assert "Learnt: a chunk 36.0 ms and 22.0 us a token" in lines[-1]
    documented = re.search(r"^    prompt: (?:.+\n)+", OPERATIONS.read_text(), re.MULTILINE)
    assert documented is not None
    assert form(lines[-1].partition("prompt: ")[2]) == form(documented[0].partition("prompt: ")[2])


def test_a_part_tells_for_how_long_its_thread_did_not_run() -> None:
    """Beside a thread that runs Python it has to wait for the interpreter; alone it looks for the GPU."""

    def looks(layers: int) -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    def waits(layers: int) -> None:
        time.sleep(0.05)

    alone, kept = (Filling([], [], advance, [True] * 2, left=2) for advance in (looks, waits))
    for filling in (alone, kept):
        filling.chunks = [Span([1], 0, {})]
        filling.run(1)
    assert 0.045 < kept.off <= kept.seconds
    assert alone.off < alone.seconds - 0.019
    assert str(kept).endswith(f"{1e3 * kept.off:.1f} ms off the CPU")


def test_layers_that_see_the_whole_past_are_allowed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Uneven)
    gaps, _ = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=4)
    assert max(gaps[5:]) < 0.0405
    assert percentile_99(gaps) > 0.035


@pytest.mark.parametrize("streams", [1, 4])
def test_hardly_a_gap_is_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Restless)
    gaps, seconds = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=streams)
    assert percentile_99(gaps) < 0.04
    assert max(gaps) < 0.05
    assert seconds < 5.5, "5.9 seconds and 51 ms with 4 streams where a last layer told what the past costs"


@pytest.mark.parametrize(
    ("streams", "tokens", "most"),
    [(12, 100_000, 9), (15, 100_000, 9), (12, 131_000, 13), (15, 131_000, 13)],
)
def test_behind_a_long_past_chunks_are_small_enough_for_many_streams(
    monkeypatch: pytest.MonkeyPatch, streams: int, tokens: int, most: float
) -> None:
    """One layer of 8,192 tokens takes up to 30 ms there, and steps of 15 ms leave 25 of 40."""
    monkeypatch.setattr("tests.engine.simulated.Machine", Restless)
    gaps, seconds = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=streams, tokens=tokens)
    assert percentile_99(gaps) < 0.04
    assert seconds < most, (
        "8.2 and 11.7 seconds with large chunks, and gaps of 41 to 49 ms for the longer one"
    )


def test_the_longest_prompt_gets_done_beside_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Restless)
    gaps, seconds = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=15, tokens=262_000)
    assert percentile_99(gaps) < 0.04
    assert seconds < 40, "30 seconds with large chunks, and gaps of 62 ms"


def first_token_beside_a_long_prompt(monkeypatch: pytest.MonkeyPatch, *, layered: bool, after: int) -> float:
    """Seconds until a request of ten tokens is answered that comes so many steps after a long prompt."""
    engine, backend, _ = busy_machine(monkeypatch, layered=layered, streams=4)
    engine.submit([1] * 100_000, SamplingParams(temperature=0, max_tokens=1), lambda output: None)
    for _ in range(after):
        engine.step()
    answer: list[Output] = []
    begin = backend.now
    engine.submit([1] * 10, SamplingParams(temperature=0, max_tokens=1), answer.append)
    while not answer:
        engine.step()
    return backend.now - begin


def test_a_short_request_beside_a_long_prompt_is_answered_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    layered, whole = (
        [first_token_beside_a_long_prompt(monkeypatch, layered=each, after=after) for after in range(20, 26)]
        for each in (True, False)
    )
    assert max(layered) < max(whole)
    assert sum(layered) < 0.5 * sum(whole), "it rides, unless it comes right when a chunk ends"


def test_a_chunk_that_costs_more_than_was_thought_is_run_in_more_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, backend = machine(monkeypatch, layered=True)
    times: list[float] = []
    forever = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    engine.submit([1] * 500, forever, lambda output: times.append(backend.now))
    for length in (3000, 1000, 5000):
        engine.submit([1] * length, SamplingParams(max_tokens=1), lambda output: None)
        while engine.state.running > 1 or engine.state.waiting:
            engine.step()
    monkeypatch.setattr(Machine, "_cost", lambda self, chunks: 0.3)
    times.clear()
    engine.submit([1] * 5000, SamplingParams(max_tokens=1), lambda output: None)
    while engine.state.running > 1 or engine.state.waiting:
        engine.step()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert sum(gap > 0.041 for gap in gaps) <= 1
    assert sum(gap > 0.032 for gap in gaps) >= 5, "what is planned is a little less"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("parts", [[2], [1, 1]])
def test_layers_in_parts_write_what_a_pass_at_once_writes(
    model: Model, packed: bool, parts: list[int]
) -> None:
    """With decode steps of another sequence in between, which unpack their layers in the same memory."""
    if packed:
        model = packed_model(pack_model(model, device="cpu", dtype=torch.float32))
    draw = random.Random(2)
    first = [draw.randrange(VOCABULARY) for _ in range(150)]
    tables = {group: list(range(8, 11)) for group in KVGroup}
    written, made = [], []
    for layers in ([2], parts):
        cache = KVCache(model.config, dict.fromkeys(KVGroup, 12), dtype=torch.float32)
        backend = TorchBackend(model, cache, max_rows=4)
        row = rows_of(model, prompts(1, seed=5)[0] + [7], cache, backend)
        backend.prefill([Span(first[:70], 0, tables)])
        advance = backend.begin([Span(first[70:], 70, tables)])
        tokens: list[int] = []
        for count in layers:
            advance(count)
            row.token, row.position = (tokens or [row.token])[-1], row.position + bool(tokens)
            [[sampled]] = backend.run([row], 1, NeverInterrupted())
            assert sampled is not None
            tokens.append(sampled.token)
        written.append([pages[8:11].clone() for pages in cache.pages])
        made.append(tokens)
    assert all(torch.equal(*pages) for pages in zip(*written, strict=True))
    assert made[0][0] == made[1][0]
    assert any(pages.any() for pages in written[0])


class NeverInterrupted:
    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize("decode", ["torch", "oracle"])
def test_requests_get_the_same_tokens(model: Model, tokenizer: Tokenizer, decode: str) -> None:
    batch = prompts(5, seed=9)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    made = []
    for pace in (Pace(most=100, gap=1e9), Slow(most=100, seed=3)):
        options = EngineOptions(max_sequences=4, max_context=512, decode=decode, prefill_chunk=100)
        engine = build_engine(model, tokenizer, options)
        engine._scheduler.pace = pace
        made.append(generate(engine, batch, [params] * 5))
    assert made[0] == made[1]


def test_engines_over_a_model_stop_between_layers(model: Model, tokenizer: Tokenizer) -> None:
    for decode in ("torch", "oracle"):
        engine = build_engine(model, tokenizer, EngineOptions(max_context=512, decode=decode))
        assert engine._scheduler.pace.layered
        assert Filling.of(engine._prefiller, [], []).left == 2, "the last of three comes with the second"
    backend = LedgerBackend(window=None, max_rows=1, max_steps=1)
    assert Filling.of(backend, [], []).left == 1
