"""What the engine counts, against what the ledger saw."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.counters import Counters
from headrace.engine.engine import Engine, KVUse
from headrace.engine.null_backend import NullBackend
from headrace.engine.request import Output
from headrace.model.config import KVGroup
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import Client, ledger_engine, prompt_of
from tests.engine.test_engine import CancelsDuringTheCall, ScoringLedger, run, submit, text_engine
from tests.waiting import WAIT

FULL = KVGroup.FULL


def test_tokens_and_steps_are_those_of_the_ledger() -> None:
    engine, backend = ledger_engine({FULL: 16}, max_steps=1)
    client = Client(engine)
    submit(engine, client, 1, 10, max_tokens=5)
    submit(engine, client, 2, 100, max_tokens=3)
    run(engine)
    counters = engine.counters
    assert counters.prompt_tokens == 110
    assert counters.prefilled_tokens == backend.fed == 108  # the last token of a prompt is a decode row
    assert counters.generated_tokens == 8
    decode_calls = [rows for rows, _ in backend.calls if rows]
    assert counters.steps == len(decode_calls)
    assert counters.steps_by_rows == {rows: decode_calls.count(rows) for rows in set(decode_calls)}
    assert counters.decode_seconds > 0
    assert counters.prefill_seconds > 0


def test_rows_that_ended_within_a_call_are_not_counted() -> None:
    engine, _ = ledger_engine({FULL: 16}, max_steps=4)
    client = Client(engine)
    submit(engine, client, 1, 1, max_tokens=1)
    submit(engine, client, 2, 1, max_tokens=4)
    run(engine)
    assert engine.counters.steps_by_rows == {2: 1, 1: 3}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_cached_tokens(prefix_cache: bool) -> None:
    engine, _ = ledger_engine({FULL: 16}, prefix_cache=prefix_cache)
    for _ in range(2):
        submit(engine, Client(engine), 1, 100, max_tokens=1)
        run(engine)
    assert engine.counters.prompt_tokens == 200
    assert engine.counters.cached_tokens == (64 if prefix_cache else 0)
    assert engine.counters.looked_up_tokens == (200 if prefix_cache else 0)


def test_a_prompt_to_be_scored_is_not_looked_up(caplog: pytest.LogCaptureFixture) -> None:
    """So the cache has not missed it, and nobody has to be told where it left what is known."""
    engine, _ = ledger_engine({FULL: 64}, prefix_cache=True, max_context=2000, ledger=ScoringLedger)
    submit(engine, Client(engine), 1, 1200, max_tokens=1)
    run(engine)
    with caplog.at_level(logging.INFO):
        submit(engine, Client(engine), 2, 1200, max_tokens=1, prompt_logprobs=0)
        run(engine)
        assert not caplog.records
        submit(engine, Client(engine), 3, 1200, max_tokens=1)
        run(engine)
        assert "0 of its 1200 tokens are cached" in caplog.text
    assert engine.counters.prompt_tokens == 3600
    assert engine.counters.looked_up_tokens == 2400


def test_a_preempted_request_is_counted_once() -> None:
    engine, backend = ledger_engine({FULL: 4}, max_steps=1, prefix_cache=True)
    client = Client(engine)
    for number in (1, 2):
        submit(engine, client, number, 60, max_tokens=100)
    run(engine)
    assert engine.state.preemptions > 0
    assert engine.counters.prompt_tokens == engine.counters.looked_up_tokens == 120
    assert engine.counters.cached_tokens == 0
    assert engine.counters.prefilled_tokens == backend.fed > 118


def test_when_a_request_left_the_queue() -> None:
    engine, _ = ledger_engine({FULL: 16}, max_sequences=1)
    client = Client(engine)
    submit(engine, client, 1, 10, max_tokens=5)
    request = engine.submit(prompt_of(2, 10), SamplingParams(max_tokens=1), lambda output: None)
    engine.step()
    waiting = request.admitted
    run(engine)
    assert waiting is None
    assert request.admitted is not None
    assert request.admitted > request.arrival


def test_a_cancellation_is_counted_once() -> None:
    engine, _ = ledger_engine({FULL: 8})
    request = engine.submit(prompt_of(1, 10), SamplingParams(max_tokens=50), lambda output: None)
    engine.step()
    for _ in range(3):
        engine.cancel(request)
    run(engine)
    engine.cancel(request)
    run(engine)
    assert (engine.counters.cancelled, engine.counters.cancelled_late) == (1, 0)


class Deaf(CancelsDuringTheCall):
    """A backend that does not listen to the interrupt."""

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        class Never:
            def is_set(self) -> bool:
                return False

        return super().run(rows, steps, Never())


def cancelled_during_a_call(backend: CancelsDuringTheCall) -> Counters:
    engine = backend.engine = text_engine(backend=backend)
    outputs: list[Output] = []
    engine.submit([1], SamplingParams(max_tokens=20, ignore_eos=True), outputs.append)
    run(engine)
    return engine.counters


def test_a_cancellation_takes_one_step_and_a_late_one_is_seen() -> None:
    sizes = {"vocab_size": 512, "max_rows": 4, "max_steps": 16}
    counters = cancelled_during_a_call(CancelsDuringTheCall(**sizes))
    assert (counters.cancelled, counters.cancelled_late) == (1, 0)
    counters = cancelled_during_a_call(Deaf(**sizes))
    assert (counters.cancelled, counters.cancelled_late) == (1, 1)


class SlowToBeSet(threading.Event):
    """An interrupt whose thread is stopped before it is set, until somebody lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def set(self) -> None:
        self.reached.set()
        assert self.go_on.wait(WAIT)
        super().set()


class CancelledSlowly(NullBackend):
    """Somebody begins to cancel in the second step, and comes to an end in the eighth."""

    engine: Engine

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        assert isinstance(interrupt, SlowToBeSet)
        somebody = threading.Thread(target=self.engine.cancel, args=[next(iter(self.engine._live))])
        for number, made in enumerate(super().run(rows, steps, interrupt), start=1):
            if number == 2:
                somebody.start()
                assert interrupt.reached.wait(WAIT)
            if number == 8:
                interrupt.go_on.set()
                somebody.join()
            yield made


def test_a_thread_that_is_stopped_while_it_cancels_makes_no_late_cancellation() -> None:
    backend = CancelledSlowly(vocab_size=512, max_rows=4, max_steps=16)
    engine = backend.engine = text_engine(backend=backend)
    outputs: list[Output] = []
    engine.submit([1], SamplingParams(max_tokens=20, ignore_eos=True), outputs.append)
    engine._interrupt = SlowToBeSet()
    run(engine)
    assert engine.counters.steps == 8
    assert (engine.counters.cancelled, engine.counters.cancelled_late) == (1, 0)


def test_what_becomes_of_the_blocks() -> None:
    engine, _ = ledger_engine({FULL: 8}, prefix_cache=True, max_steps=1)
    client = Client(engine)
    assert engine.kv_use == {"full": KVUse(total=8, free=8, held=0)}
    submit(engine, client, 1, 100, max_tokens=20)
    while not client.tokens[1]:
        engine.step()
    use = engine.kv_use["full"]
    assert (use.held, use.free, use.cached) == (2, 6, 0)
    run(engine)
    use = engine.kv_use["full"]
    assert (use.held, use.free, use.cached) == (0, 7, 1)  # the full block of the two


def test_a_shared_block_is_held_once() -> None:
    engine, _ = ledger_engine({FULL: 8}, prefix_cache=True, max_steps=1)
    client = Client(engine)
    submit(engine, client, 1, 100, max_tokens=1)
    run(engine)
    for _ in range(2):  # the ledger tells sequences apart by their tables
        engine.submit(prompt_of(1, 100), SamplingParams(max_tokens=50), lambda output: None)
    engine.schedule()
    assert len(engine._scheduler.running) == 2
    assert engine.kv_use["full"].held == 3


def test_a_model_with_windows_has_two_groups() -> None:
    engine, _ = ledger_engine({FULL: 8, KVGroup.SLIDING: 8}, window=64, max_steps=1)
    client = Client(engine)
    submit(engine, client, 1, 300, max_tokens=20)
    while not client.tokens[1]:
        engine.step()
    use = engine.kv_use
    assert use["full"].held == 5
    assert use["sliding"].held < 5
    assert all(each.cached == 0 for each in use.values())
