"""Where the time of a pass's beginning goes, on a CPU: what is made slow on purpose shows in its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headrace.engine.torch_backend import TorchBackend
from headrace.model import transformer
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import KVCache, blocks_for
from headrace.model.layers import Gated
from headrace.model.paging import PagedSpans
from headrace.model.synthetic import synthetic_model
from headrace.model.transformer import Model
from tests.model.test_paging import small_north
from tools import time_beginnings
from tools.time_beginnings import Beginning, Watch, busy_thread, poll, report

LENGTH = 400
TABLES = dict.fromkeys(KVGroup, range(blocks_for(LENGTH)))
SLOW = 0.03


@pytest.fixture
def model() -> Model:
    return synthetic_model(small_north(), seed=3)  # one of its own: watches leave hooks


@pytest.fixture
def backend(model: Model) -> TorchBackend:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, blocks_for(LENGTH)), dtype=torch.float32)
    return TorchBackend(model, cache, max_rows=1)


class Clock:
    """Stands still, but for who sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def perf_counter(self) -> float:
        return self._now

    def thread_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_beginnings, "time", clock)
    return clock


def slow_plan(model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(PagedSpans):
        def __init__(self, *given: object) -> None:
            clock.sleep(SLOW)
            super().__init__(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(transformer, "PagedSpans", Slow)


def slow_part(part: type[nn.Module]) -> Callable[[Model, Clock, pytest.MonkeyPatch], None]:
    def slow(model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        first = model.blocks[0]
        module = next(module for module in first.modules() if isinstance(module, part))
        plain = module.forward

        def forward(*given: torch.Tensor) -> torch.Tensor:
            clock.sleep(SLOW)
            made: torch.Tensor = plain(*given)
            return made

        monkeypatch.setattr(module, "forward", forward)

    return slow


def test_only_the_first_layer_is_run(model: Model, backend: TorchBackend) -> None:
    Watch(model).time(backend, Span([1, 2, 3] * 20, 0, TABLES))
    first, *later = backend._cache.pages
    assert first.any()
    assert not any(pages.any() for pages in later)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (slow_plan, {"plan"}),
        (slow_part(nn.Linear), {"launch", "products"}),
        (slow_part(Gated), {"launch"}),
    ],
)
def test_what_is_slow_shows_in_its_place(
    model: Model,
    backend: TorchBackend,
    make: Callable[[Model, Clock, pytest.MonkeyPatch], None],
    where: set[str],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, span = Watch(model), Span([1, 2, 3] * 20, 0, TABLES)
    make(model, clock, monkeypatch)
    slow = watch.time(backend, span)
    times = {name: getattr(slow, name) for name in ("plan", "launch", "products", "wait")}
    assert times == {name: pytest.approx(1e3 * SLOW * (name in where)) for name in times}
    assert slow.off == pytest.approx(1e3 * SLOW), "asleep, it was not running"


def test_a_report_has_a_line_for_each_way_to_begin(
    model: Model, backend: TorchBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [token % 150 for token in range(LENGTH)]
    report(backend, model, prompt, TABLES, tokens=(30, 70), pasts=(0, 130), turn=(20, 21), idle=0.001)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * 5 + 1
    counts = [(line.split()[0], line.split()[3].rstrip(",")) for line in lines[:-1:5]]
    assert counts == [("30", "0"), ("70", "0"), ("31", "130"), ("71", "130")]
    assert [line.split(", ")[1].split(":")[0].strip() for line in lines[:5]] == [
        *("new", "again", "idle", "polling", "beside Python"),
    ]
    assert "20: " in lines[-1]
    assert "21: " in lines[-1]


def test_a_busy_thread_ends_with_what_it_ran_beside() -> None:
    before = set(threading.enumerate())  # others may end meanwhile
    with busy_thread(True):
        [busy] = set(threading.enumerate()) - before
    assert not busy.is_alive()
    with busy_thread(False):
        assert not set(threading.enumerate()) - before


def test_the_whole_is_the_sum_of_its_parts() -> None:
    beginning = Beginning(plan=1, launch=4, products=3, wait=2, gpu=5, off=0.5, allocations=6)
    assert str(beginning) == (
        "   7.0 ms: plan 1.0, launch 4.0, of this products 3.0, wait 2.0; "
        "GPU 5.0, off the CPU 0.5, 6 allocations"
    )
    begun = time.perf_counter()
    poll(0.01)
    assert time.perf_counter() - begun >= 0.01
