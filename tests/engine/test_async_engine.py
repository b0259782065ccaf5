"""The engine on its thread: streaming into an event loop, leaving early, failing, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from headrace.engine.async_engine import AsyncEngine, EngineDeadError
from headrace.engine.request import FinishReason, Output
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from tests.engine.ledger import STRIDE, LedgerBackend, ledger_engine, prompt_of

FULL = KVGroup.FULL


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    inner, _ = ledger_engine({FULL: 32}, max_context=400)
    engine = AsyncEngine(inner)
    engine.start()
    yield engine
    engine.close()


async def tokens_of(engine: AsyncEngine, number: int, params: SamplingParams) -> list[int]:
    outputs = [output async for output in engine.generate(prompt_of(number, 10), params)]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    return [token for output in outputs for token in output.token_ids]


def test_many_streams_at_once(engine: AsyncEngine) -> None:
    async def main() -> list[list[int]]:
        params = SamplingParams(max_tokens=50)
        return await asyncio.gather(*(tokens_of(engine, number, params) for number in range(1, 9)))

    for number, tokens in enumerate(asyncio.run(main()), start=1):
        assert tokens == [number * STRIDE + position for position in range(10, 60)]


async def idle(engine: AsyncEngine) -> bool:
    """Whether the engine comes to rest within five seconds."""
    for _ in range(500):
        if engine.state.running == engine.state.waiting == 0:
            return True
        await asyncio.sleep(0.01)
    return False


def test_leaving_early_cancels(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(prompt_of(1, 10), SamplingParams())
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert await idle(engine)

    asyncio.run(main())
    assert engine.state.free_blocks == {"full": 32}


class Breaks(LedgerBackend):
    """A backend whose device is lost."""

    def prefill(self, chunks: Sequence[Span]) -> None:
        raise RuntimeError("the device is lost")


def test_a_failing_backend_ends_everything_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    inner, _ = ledger_engine({FULL: 32})
    broken = Breaks(window=None, max_rows=4, max_steps=1)
    inner._prefiller = broken
    engine = AsyncEngine(inner)
    engine.start()
    outputs: list[Output] = []
    done = threading.Event()

    def sink(output: Output) -> None:
        outputs.append(output)
        done.set()

    engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert done.wait(5)
    engine.close()
    [output] = outputs
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == engine.error == "the engine failed: the device is lost"
    assert not engine.alive
    with pytest.raises(EngineDeadError, match="the device is lost"):
        engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert "the engine failed" in caplog.text


def test_closing_ends_what_runs() -> None:
    inner, _ = ledger_engine({FULL: 4096}, max_context=200_000)
    engine = AsyncEngine(inner)
    engine.start()
    outputs: list[Output] = []
    started = threading.Event()

    def sink(output: Output) -> None:
        outputs.append(output)
        started.set()

    engine.submit(prompt_of(1, 10), SamplingParams(), sink)
    assert started.wait(5)
    engine.close()
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
    assert done.wait(5)
    engine._thread.join(5)
    assert engine.error is not None
    assert "leak or double use" in engine.error
    assert "the engine failed" in caplog.text
