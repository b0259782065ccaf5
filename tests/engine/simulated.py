"""A GPU that costs what an H200 was measured to, on its own clock: for tests of how long answers wait."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

import pytest

from headrace.engine import filling
from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.blocks import BlockManager
from headrace.engine.engine import Engine
from headrace.engine.null_backend import NullBackend
from headrace.engine.options import GPU_CHUNK
from headrace.engine.pace import Pace
from headrace.engine.request import Output
from headrace.engine.scheduler import Scheduler
from headrace.model.batch import Span
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams
from headrace.model.tiled import TILE
from headrace.model.tokenizer import Tokenizer
from tests.engine.test_schedules import FULL


class Machine(NullBackend):
    """What steps and chunks cost on an H200, by their rows and tokens, on a clock of its own.

    By `accidents`, the first layers of a pass take so many seconds more; passes are counted from 0. The model
    has 49 layers, of which the last takes next to nothing and comes with the one before.
    """

    accidents: Mapping[int, float] = {}

    def __init__(self, *, layered: bool) -> None:
        super().__init__(vocab_size=300_000, max_rows=16, max_steps=16)
        self.now = 0.0
        self._passes = 0
        if layered:
            self.layers = 48
            self.full = [layer % 4 == 0 for layer in range(48)]
            self.begin = self._begin

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter  # nobody else is there

    def prefill(self, chunks: Seq[Span]) -> None:
        self.now += self._cost(chunks)

    def _cost(self, chunks: Seq[Span]) -> float:
        return 0.036 + 22e-6 * sum(len(span.tokens) for span in chunks)

    def _begin(self, chunks: Seq[Span]) -> Callable[[int], None]:
        late = self.accidents.get(self._passes, 0.0)
        self._passes += 1

        def advance(layers: int) -> None:
            nonlocal late
            self.now += self._cost(chunks) * layers / self.layers + late
            late = 0.0

        return advance

    def run(self, rows: Seq[DecodeRow], steps: int, interrupt: Interrupt) -> Iterator[Seq[Sampled | None]]:
        capacity = next(capacity for capacity in (1, 2, 4, 8, 16) if capacity >= len(rows))
        for made in super().run(rows, steps, interrupt):
            self.now += {1: 2.3e-3, 2: 3.2e-3, 4: 5e-3, 8: 8.8e-3, 16: 15.1e-3}[capacity]
            yield made


class Uneven(Machine):
    """Every fourth layer sees the whole past: for each pair of tokens four products of 4096 numbers, at
    550 TFLOP/s. The others cost what they do at the beginning of a prompt."""

    def _begin(self, chunks: Seq[Span]) -> Callable[[int], None]:
        pairs = sum(len(span.tokens) * (span.start + span.end) / 2 for span in chunks)
        costs = (
            self._cost(chunks) / self.layers + (pairs * 4 * 4096 / 550e12 if layer % 4 == 0 else 0.0)
            for layer in range(self.layers)
        )

        def advance(layers: int) -> None:
            self.now += sum(itertools.islice(costs, layers))

        return advance


class Restless(Uneven):
    """As the logs of a server on an H200 tell (`parts-h200.jsonl`), by least squares over each pass.

    A layer takes 0.8 ms, 0.41 for every 1024 tokens, and 0.5 where some stick out of tiles; one that sees all
    of the past 24.6 ps more for each pair, twice as many for tokens that stick out. The first part is up to
    2.5 ms longer, or 4 to 13 in the first pass of a size that is no multiple of tiles. Chance moves a part by
    2 %, and makes one in fifty up to 3 ms longer.
    """

    def __init__(self, *, layered: bool) -> None:
        super().__init__(layered=layered)
        self._dice = random.Random(8)
        self._sizes: set[int] = set()

    def _cost(self, chunks: Seq[Span]) -> float:
        tokens = sum(len(span.tokens) for span in chunks)
        odd = any(_sticking_out(span) for span in chunks)
        return 48 * (0.8e-3 + 0.41e-3 * tokens / TILE + 0.5e-3 * odd)

    def _begin(self, chunks: Seq[Span]) -> Callable[[int], None]:
        pairs = sum((len(span.tokens) + _sticking_out(span)) * (span.start + span.end) / 2 for span in chunks)
        layer = self._cost(chunks) / self.layers
        costs = iter([layer + 24.6e-12 * pairs * full for full in self.full])
        tokens = sum(len(span.tokens) for span in chunks)
        new = tokens % TILE and tokens not in self._sizes
        late = self._dice.uniform(*((4e-3, 13e-3) if new else (0.0, 2.5e-3)))
        self._sizes.add(tokens)

        def advance(layers: int) -> None:
            nonlocal late
            chance = self._dice.uniform(0.0, 3e-3) if self._dice.random() < 0.02 else 0.0
            self.now += sum(itertools.islice(costs, layers)) * self._dice.gauss(1, 0.02) + late + chance
            late = 0.0

        return advance


def _sticking_out(span: Span) -> int:
    """How many tokens of a chunk are in no whole tile of it."""
    whole = span.end // TILE * TILE - -(-span.start // TILE) * TILE
    return len(span.tokens) - max(0, whole)


def machine(monkeypatch: pytest.MonkeyPatch, *, layered: bool) -> tuple[Engine, Machine]:
    """An engine on such a machine, as `build` would put it together."""
    backend = Machine(layered=layered)
    engine = Engine(
        backend=backend,
        prefiller=backend,
        scheduler=Scheduler(
            BlockManager({FULL: 8192}, window=None),
            pace=Pace(most=GPU_CHUNK, gap=0.04, layered=layered),
            max_sequences=16,
            max_steps=16,
            riding_rows=16,
        ),
        tokenizer=Tokenizer.synthetic(512),
        vocab_size=300_000,
        max_context=262_144,
        queue=64,
    )
    monkeypatch.setattr("headrace.engine.engine.time", backend)
    monkeypatch.setattr(filling, "time", backend)
    return engine, backend


def busy_machine(
    monkeypatch: pytest.MonkeyPatch, *, layered: bool, streams: int, rehearse: bool = False
) -> tuple[Engine, Machine, list[float]]:
    """One on which so many streams run, with the times at which the first of them gets its tokens."""
    engine, backend = machine(monkeypatch, layered=layered)
    if rehearse:
        engine.rehearse()
    times: list[float] = []
    forever = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    engine.submit([1] * 500, forever, lambda output: times.append(backend.now))
    for length in range(100, 100 * streams, 100):
        engine.submit([1] * length, forever, lambda output: None)
    while len(times) < 300:
        engine.step()
    times.clear()
    return engine, backend, times


def gaps_beside_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
    *,
    layered: bool,
    streams: int,
    rehearse: bool = False,
    tokens: int = 100_000,
) -> tuple[list[float], float]:
    """Seconds between tokens of a stream while a prompt of so many is computed, and for the prompt."""
    engine, backend, times = busy_machine(monkeypatch, layered=layered, streams=streams, rehearse=rehearse)
    answer: list[Output] = []
    begin = backend.now
    engine.submit([1] * tokens, SamplingParams(temperature=0, max_tokens=1), answer.append)
    while not answer:
        engine.step()
    return [after - before for before, after in itertools.pairwise(times)], backend.now - begin


def percentile_99(gaps: list[float]) -> float:
    return sorted(gaps)[int(0.99 * len(gaps))]
