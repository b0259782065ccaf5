"""The engine on its thread: streaming into an event loop, leaving early, failing, closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.request import EngineDeadError, FinishReason, Output
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import STRIDE, LedgerBackend, ledger_engine, prompt_of
from tests.waiting import WAIT, until

FULL = KVGroup.FULL


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    inner, _ = ledger_engine({FULL: 32}, max_context=400)
    engine = AsyncEngine(inner)
    engine.start()
    yield engine
    engine.close()


class Sink:
    """Keeps a request's outputs and tells when the last has come."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.done = threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.done.set()


def test_many_requests_from_many_threads(engine: AsyncEngine) -> None:
    sinks = {number: Sink() for number in range(1, 9)}
    threads = [
        threading.Thread(
            target=engine.submit, args=(prompt_of(number, 10), SamplingParams(max_tokens=50), sink)
        )
        for number, sink in sinks.items()
    ]
    for thread in threads:
        thread.start()
    for number, sink in sinks.items():
        assert sink.done.wait(WAIT)
        tokens = [token for output in sink.outputs for token in output.token_ids]
        assert tokens == [number * STRIDE + position for position in range(10, 60)]


def test_cancelling_from_another_thread(engine: AsyncEngine) -> None:
    sink = Sink()
    engine.cancel(engine.submit(prompt_of(1, 10), SamplingParams(), sink))
    assert sink.done.wait(WAIT)
    assert sink.outputs[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    last = Sink()
    engine.submit(prompt_of(2, 10), SamplingParams(max_tokens=1), last)
    assert last.done.wait(WAIT)
    engine.close()
    assert engine.state.free_blocks == {"full": 32}


class Breaks(LedgerBackend):
    """A backend whose device is lost."""

    def prefill(self, chunks: Sequence[Span]) -> None:
        raise RuntimeError("the device is lost")


def test_a_failing_backend_ends_everything_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    inner, _ = ledger_engine({FULL: 32})
    broken = Breaks(window=None, max_rows=4, max_steps=1)
    broken.engine = inner
    inner._prefiller = broken
    engine = AsyncEngine(inner)
    engine.start()
    outputs: list[Output] = []
    done = threading.Event()

    def sink(output: Output) -> None:
        outputs.append(output)
        done.set()

    engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert done.wait(WAIT)
    engine.close()
    [output] = outputs
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == engine.error == "the engine failed: the device is lost"
    assert not engine.alive
    with pytest.raises(EngineDeadError, match="the device is lost"):
        engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert "the engine failed" in caplog.text


class Panic(BaseException):
    """As what a panic in a library written in Rust becomes: no Exception."""


class Panics(LedgerBackend):
    def prefill(self, chunks: Sequence[Span]) -> None:
        raise Panic("index out of bounds")


def test_a_panic_ends_everything_with_an_error_too() -> None:
    inner, _ = ledger_engine({FULL: 32})
    inner._prefiller = Panics(window=None, max_rows=4, max_steps=1)
    engine = AsyncEngine(inner)
    engine.start()
    sink = Sink()
    engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert sink.done.wait(WAIT)
    assert sink.outputs[-1].error == "the engine failed: index out of bounds"
    until(lambda: engine.dead)
    with pytest.raises(EngineDeadError, match="index out of bounds"):
        engine.submit(prompt_of(1, 10), SamplingParams(), sink)


def test_a_sink_that_raises_ends_the_others_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    inner, _ = ledger_engine({FULL: 32})
    engine = AsyncEngine(inner)
    engine.start()
    both_are_there = threading.Event()

    def broken(output: Output) -> None:
        assert both_are_there.wait(WAIT)
        raise RuntimeError("nobody listens")

    sink = Sink()
    engine.submit(prompt_of(1, 10), SamplingParams(), broken)
    engine.submit(prompt_of(2, 10), SamplingParams(), sink)
    both_are_there.set()
    assert sink.done.wait(WAIT)
    assert sink.outputs[-1].error == "the engine failed: nobody listens"
    assert "could not be told" in caplog.text


def test_closing_what_was_never_started_ends_what_waits() -> None:
    inner, _ = ledger_engine({FULL: 32})
    engine = AsyncEngine(inner)
    sink = Sink()
    engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    engine.close()
    assert sink.outputs[-1].error == "the engine is shutting down"
    with pytest.raises(EngineDeadError):
        engine.submit(prompt_of(1, 10), SamplingParams(), sink)


def test_closing_ends_what_runs() -> None:
    inner, _ = ledger_engine({FULL: 32})
    engine = AsyncEngine(inner)
    engine.start()
    outputs: list[Output] = []
    started = threading.Event()

    def sink(output: Output) -> None:
        outputs.append(output)
        started.set()
        until(lambda: engine.unready)  # so that it does not come to its end before

    engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert started.wait(WAIT)
    engine.close()
    assert len(outputs) < 10
    assert outputs[-1].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineDeadError):
        engine.submit(prompt_of(1, 10), SamplingParams(), sink)


def test_an_idle_engine_checks_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """A leak is found as soon as there is nothing to do."""
    inner, _ = ledger_engine({FULL: 32})
    inner._scheduler.blocks.pools[FULL].allocate(1)
    engine = AsyncEngine(inner)
    engine.start()
    done = threading.Event()
    engine.submit(prompt_of(1, 10), SamplingParams(max_tokens=1), lambda _: done.set())
    assert done.wait(WAIT)
    engine._thread.join(WAIT)
    assert engine.error is not None
    assert "leak or double use" in engine.error
    assert "the engine failed" in caplog.text
