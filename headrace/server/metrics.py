"""`GET /metrics`: figures in the form that Prometheus reads, with the names and shapes of vLLM's.

    of the engine     plain sums that it keeps for itself (headrace/engine/counters.py), read when asked for
    of the answers    times that only the server knows, observed as tokens reach the event loop

docs/operations.md explains each of them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from headrace import __version__
from headrace.engine.async_engine import AsyncEngine
from headrace.server.record import Record, Timing

PREFIX = "headrace:"
REASONS = ("stop", "length", "tool_calls", "abort", "error")

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN = tuple(
    ms / 1000 for ms in (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 40, 50, 75, 100, 250, 500, 1000, 10000)
)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_QUEUED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
_TOKENS = tuple(4**power for power in range(10))
_ALL = float("inf")
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Distribution:
    """How often values up to each of `bounds` came. The event loop writes, any thread reads.

    The library's own histogram takes several times as long to observe a value, and every token is observed,
    while the engine's thread waits for the interpreter.
    """

    def __init__(self, name: str, explained: str, bounds: Sequence[float]) -> None:
        self.name, self.explained = name, explained
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, label: Mapping[str, str]) -> Metric:
        """What is told of it."""
        counts = dict(zip((*self._bounds, _ALL), self._counts, strict=True))
        return _histogram(self.name, self.explained, label, counts, self._bounds, self._sum)


def _histogram(
    name: str,
    explained: str,
    label: Mapping[str, str],
    counts: Mapping[float, int],
    bounds: Sequence[float],
    total: float,
) -> Metric:
    """A histogram of `counts` values each, with a bucket up to each bound and one for all."""
    family = HistogramMetricFamily(PREFIX + name, explained, labels=list(label))
    buckets = [
        (
            "+Inf" if bound == _ALL else str(float(bound)),
            sum(count for value, count in counts.items() if value <= bound),
        )
        for bound in (*bounds, _ALL)
    ]
    family.add_metric(list(label.values()), buckets, total)
    return family


class Metrics(Collector):
    """The figures of one served model, in a registry of their own: two servers in a process do not meet."""

    def __init__(self, engine: AsyncEngine, *, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._distributions: list[Distribution] = []
        self._first = self._distribution(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _FIRST
        )
        self._between = self._distribution(
            "inter_token_latency_seconds", "Between two tokens of an answer", _BETWEEN
        )
        self._mean = self._distribution(
            "request_time_per_output_token_seconds", "The mean of an answer's gaps", _BETWEEN
        )
        self._queued = self._distribution("request_queue_time_seconds", "Waiting for the engine", _QUEUED)
        self._whole = self._distribution("e2e_request_latency_seconds", "From arrival to end", _WHOLE)
        self._prompt = self._distribution("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._generated = self._distribution("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._ended = self._counter("request_success", "Answers by why they ended", "finished_reason")
        self._errors = self._counter("request_errors", "Requests that were told of an error", "kind")
        self._left = self._counter("request_cancellations", "Answers whose client left before their end")
        for reason in REASONS:
            self._ended.labels(**self._label, finished_reason=reason)
        self._left.labels(**self._label)
        self.registry.register(EngineCollector(engine, self._label))
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterable[Metric]:
        """The distributions, for the registry."""
        return [each.family(self._label) for each in self._distributions]

    def _distribution(self, name: str, explained: str, bounds: Sequence[float]) -> Distribution:
        self._distributions.append(Distribution(name, explained, bounds))
        return self._distributions[-1]

    def _counter(self, name: str, explained: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, explained, [*self._label, *labels], registry=self.registry)

    def token(self, timing: Timing, now: float) -> None:
        """A token of an answer has come."""
        if timing.last is None:
            timing.first = now
            self._first.observe(now - timing.arrival)
            if timing.queued is not None:
                self._queued.observe(timing.queued)
        else:
            self._between.observe(now - timing.last)
        timing.last = now

    def request_ended(self, record: Record) -> None:
        """A request is over, one way or another."""
        if record.error is not None:
            self._errors.labels(**self._label, kind=record.error).inc()
        for timing in record.timings:
            self._answer_ended(timing, gone=record.gone)

    def _answer_ended(self, timing: Timing, *, gone: bool) -> None:
        reason = timing.finish_reason or ("abort" if gone else "error")
        self._ended.labels(**self._label, finished_reason=reason).inc()
        if reason == "abort":
            self._left.labels(**self._label).inc()
        end = time.monotonic() if timing.last is None else timing.last
        self._whole.observe(end - timing.arrival)
        self._prompt.observe(len(timing.request.prompt))
        self._generated.observe(timing.tokens)
        if timing.tokens > 1 and timing.first is not None:
            self._mean.observe((end - timing.first) / (timing.tokens - 1))


class EngineCollector(Collector):
    """Reads an engine when it is asked. On any thread; the figures need not be of one moment."""

    def __init__(self, engine: AsyncEngine, label: dict[str, str]) -> None:
        self._engine = engine
        self._label = label
        self._names = list(label)
        self._values = list(label.values())

    def collect(self) -> Iterable[Metric]:
        yield from self._state()
        yield from self._blocks()
        yield from self._sums()
        yield self._steps()

    def _state(self) -> Iterable[Metric]:
        state, dead = self._engine.state, self._engine.dead  # a dead engine leaves its lists as they were
        running, waiting = (0, 0) if dead else (state.running, state.waiting)
        yield self._gauge("num_requests_running", "Requests that the engine works on", running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", waiting)
        yield self._gauge("engine_ready", "1 if requests can be served", self._engine.unready is None)
        info = GaugeMetricFamily(
            f"{PREFIX}build_info", "Always 1; what runs", labels=[*self._names, "version"]
        )
        info.add_metric([*self._values, __version__], 1)
        yield info
        yield self._counter("num_preemptions", "Requests that gave up their KV for others", state.preemptions)

    def _blocks(self) -> Iterable[Metric]:
        use = {} if self._engine.dead else self._engine.kv_use  # what it left is nobody's
        fullest = max((each.held / each.total for each in use.values()), default=0.0)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV that running requests hold, 1 for all of it", fullest
        )
        blocks = GaugeMetricFamily(
            f"{PREFIX}kv_cache_blocks",
            "KV blocks of each group of layers by what they are used for",
            labels=[*self._names, "group", "state"],
        )
        for group, each in use.items():
            for state, count in (("held", each.held), ("cached", each.cached), ("free", each.free)):
                blocks.add_metric([*self._values, group, state], count)
        yield blocks

    def _sums(self) -> Iterable[Metric]:
        counters = self._engine.counters
        for name, explained, value in (
            ("prompt_tokens", "Tokens of prompts", counters.prompt_tokens),
            ("prompt_tokens_cached", "Tokens of prompts whose KV was there already", counters.cached_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", counters.looked_up_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache", counters.cached_tokens),
            ("prefill_tokens", "Tokens of prompts that were computed", counters.prefilled_tokens),
            ("prefill_tokens_riding", "Of those, the ones fed in decode rows", counters.riding_tokens),
            ("generation_tokens", "Tokens of answers", counters.generated_tokens),
            ("prefill_seconds", "Time in which prompts were computed", counters.prefill_seconds),
            ("decode_seconds", "Time in which answers were computed", counters.decode_seconds),
            ("decode_steps", "Decode steps", counters.steps),
            ("engine_cancellations", "Requests cancelled in the engine, for any reason", counters.cancelled),
            ("late_cancellations", "Of those, the ones that took over a step", counters.cancelled_late),
        ):
            yield self._counter(name, explained, value)

    def _steps(self) -> Metric:
        by_rows = {float(rows): count for rows, count in self._engine.counters.steps_by_rows.copy().items()}
        total = sum(rows * count for rows, count in by_rows.items())
        explained = "Rows of a decode step"
        return _histogram("decode_rows_per_step", explained, self._label, by_rows, _ROWS, total)

    def _gauge(self, name: str, explained: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, explained, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, explained: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, explained, labels=self._names)
        family.add_metric(self._values, value)
        return family


def router(metrics: Metrics) -> APIRouter:
    """The endpoint. Always in plain text: in OpenMetrics' form the library takes the colons out of names."""
    routes = APIRouter()

    @routes.get("/metrics")
    def get_metrics() -> Response:  # on a thread: it takes milliseconds, which streams would feel
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return routes
