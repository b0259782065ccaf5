"""Chunks of prompts while nobody decodes: large, but not so that a request that comes then waits for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from headrace.engine.options import GPU_CHUNK
from headrace.engine.pace import Pace
from headrace.model.batch import Span
from headrace.model.sampling import SamplingParams
from tests.engine.simulated import Uneven, machine

LONG, SHORT = 262_000, 2000


class Alone(Uneven):
    """An H200 as it is measured without streams: 8,192 tokens take 165 ms, 16,384 take 324 and 437 ms."""

    spans: list[list[tuple[int, int]]]
    began: list[float]

    def _cost(self, chunks: Sequence[Span]) -> float:
        return 0.032 + 14.6e-6 * sum(len(span.tokens) for span in chunks)

    def _begin(self, chunks: Sequence[Span]) -> Callable[[int], None]:
        self.spans.append([(span.start, span.end) for span in chunks])
        self.began.append(self.now)
        return super()._begin(chunks)

    def prefill(self, chunks: Sequence[Span]) -> None:
        raise AssertionError("there are layers")

    def rehearse(self, *, tokens: int, context: int) -> list[tuple[int, float]]:
        pair = 12 * 4 * 4096 / 550e12
        sizes = [count for count in (64, 512, 2048, 8192) if count <= tokens]
        return [(count, 0.032 + 14.6e-6 * count + pair * count**2 / 2) for count in sizes]


class Run:
    """A prompt of so many tokens that comes to an idle server, in chunks of up to `most` tokens. `late`
    seconds later comes a short one: how long it then waits for its answer, `waited`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tokens: int,
        *,
        most: int = GPU_CHUNK,
        late: float | None = None,
    ) -> None:
        monkeypatch.setattr("tests.engine.simulated.Machine", Alone)
        engine, backend = machine(monkeypatch, layered=True)
        assert isinstance(backend, Alone)
        backend.spans, backend.began = [], []
        self.pace = engine._scheduler.pace
        self.pace.most = most
        engine.rehearse()
        self.engine, self.backend = engine, backend
        begin, params = backend.now, SamplingParams(max_tokens=1)
        long: list[float] = []
        short: list[float] = []
        engine.submit([1] * tokens, params, lambda output: long.append(backend.now))
        arrives = late
        while engine.step():
            if arrives is not None and backend.now - begin >= arrives:  # during the step that is now over
                engine.submit([2] * SHORT, params, lambda output: short.append(backend.now))
                arrives = None
        self.seconds = long[0] - begin
        self.waited = short[0] - begin - late if late is not None else 0.0
        self.passes = [
            after - before for before, after in zip(backend.began, backend.began[1:], strict=False)
        ]


def test_the_longest_prompts_passes_are_as_large_as_half_a_second_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, LONG)
    chunks = [end - start for [(start, end)] in run.backend.spans]
    assert chunks[:2] == [GPU_CHUNK] * 2, "what the past costs is seen at the second"
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[-2] == 8192, "smaller ones would take the prompt too long"
    assert all(chunk % 1024 == 0 for chunk in chunks[:-1])
    for chunk, seconds in list(zip(chunks, run.passes, strict=False))[2:]:
        assert seconds < 0.505 or chunk == 8192
        assert seconds > 0.44 or chunk == 8192


def test_a_prompt_is_done_sooner_than_by_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in (16_384, 32_768, 131_000, LONG):
        small, large = (Run(monkeypatch, tokens, most=most).seconds for most in (8192, GPU_CHUNK))
        assert large < small
        assert large < 0.93 * small or tokens > 32_768


def test_a_request_that_comes_meanwhile_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a pass at most, and for the next, in which it is."""
    for late in (0.1, 0.4, 1.0, 1.7, 3.1, 4.9):
        assert Run(monkeypatch, LONG, late=late).waited < 1.02
    for late in (6.3, 9.1, 14.2):  # chunks are of 8,192 tokens in any case
        small, large = (Run(monkeypatch, LONG, most=most, late=late).waited for most in (8192, GPU_CHUNK))
        assert large < small + 0.7 * max(Run(monkeypatch, LONG).passes)


@pytest.mark.parametrize("past", [1000, 40_000, 90_001, 250_000])
def test_a_chunk_ends_with_a_whole_tile_and_is_not_smaller_than_it_need_be(
    monkeypatch: pytest.MonkeyPatch, past: int
) -> None:
    pace = Run(monkeypatch, LONG).pace
    tokens = pace.bearable(streams=0, past=past)
    costs = [
        0.032 + 14.6e-6 * count + 12 * 4 * 4096 / 550e12 * count * (past + count / 2)
        for count in (tokens, tokens + 1024)
    ]
    if tokens == GPU_CHUNK:
        assert costs[0] < 0.505
        return
    assert (past + tokens) % 1024 == 0
    assert costs[0] < 0.505 < 1.01 * costs[1] or 8192 <= tokens < 8192 + 1024


@pytest.mark.parametrize("most", [512, 8192, 20_480])
def test_a_smaller_bound_is_kept_to_and_a_larger_one_is_of_use(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    run = Run(monkeypatch, 60_000, most=most)
    chunks = [end - start for [(start, end)] in run.backend.spans]
    assert chunks[0] == most
    assert max(chunks) == most
    assert most > 8192 or set(chunks[:-1]) == {most}


def test_as_long_as_nothing_is_known_chunks_are_as_large_as_may_be() -> None:
    pace = Pace(most=GPU_CHUNK, gap=0.04, layered=True)
    assert pace.bearable(streams=0, past=200_000) == pace.tokens(streams=0) == GPU_CHUNK


def test_prompts_that_wait_together_share_a_chunk_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest has half of it at least, and what is left goes to the shortest first."""
    monkeypatch.setattr("tests.engine.simulated.Machine", Alone)
    engine, backend = machine(monkeypatch, layered=True)
    assert isinstance(backend, Alone)
    backend.spans, backend.began = [], []
    for length in (30_000, 20_000, 5000):
        engine.submit([length] * length, SamplingParams(max_tokens=1), lambda output: None)
    engine.step()
    assert backend.spans == [[(0, 8192), (0, 3072), (0, 4999)]], "3193, of which 121 are no tile"


def test_beside_answers_a_chunk_is_no_larger_than_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes then waits for the end of a chunk, which takes several steps."""
    run = Run(monkeypatch, 131_000)
    engine, backend = run.engine, run.backend
    engine.submit([1] * 20, SamplingParams(max_tokens=5000, ignore_eos=True), lambda output: None)
    for _ in range(20):
        engine.step()
    backend.spans.clear()
    engine.submit([3] * 131_000, SamplingParams(max_tokens=1), lambda output: None)
    for _ in range(200):
        engine.step()
    chunks = [end - start for [(start, end)] in backend.spans]
    assert len(chunks) > 5
    assert 4096 < max(chunks) <= 8192
