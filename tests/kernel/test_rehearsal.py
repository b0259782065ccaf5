"""First launches before a server is ready: every capacity, all that sampling needs, and no trace of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from headrace.kernel import pool as pools
from headrace.kernel import rehearsal
from headrace.kernel.check.against_oracle import Bench
from headrace.kernel.check.kernels import Tokens, logits_of
from headrace.kernel.inputs import RowInputs
from headrace.kernel.pool import KernelPool
from headrace.kernel.records import ROW_INPUT, RowFlag
from headrace.model.config import KVGroup
from headrace.model.kv import KVCache
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.world import VOCABULARY, north
from headrace.step.pack import PackedWeights
from tests.kernel.emulated import COMPILER, EmulationError
from tests.kernel.emulated.decode import EmulatedKernel
from tests.kernel.emulated.libraries import Libraries

CPU = torch.device("cpu")


@dataclass
class Recorded:
    """A launcher that fills in what a launch is told, as the real one does, and notes it."""

    capacity: int
    cache: KVCache
    inputs: RowInputs = field(init=False)
    launches: list[list[LaunchRow]] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)  # of all rows of each launch
    wrote: bool = False

    def __post_init__(self) -> None:
        self.inputs = RowInputs(self.capacity, VOCABULARY, CPU)

    def run(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Sampled | None]]:
        assert steps == 1
        given = [row for row in rows if row is not None]
        self.inputs.fill(rows)
        self.inputs.send()
        self.launches.append(given)
        written = self.inputs._rows.device.numpy().view(ROW_INPUT)["flags"]
        self.flags.append(int(written[0]) if len(set(written.tolist())) == 1 else -1)
        for row in given:
            for pages in self.cache.pages:
                pages[row.tables[KVGroup.FULL][0]] = 1.0
        self.wrote = True
        yield [Sampled(3) for _ in rows]
        self.inputs.ran(rows, [[3] for _ in rows])

    def forget(self) -> None:
        self.inputs.forget()


def made(monkeypatch: pytest.MonkeyPatch, *, max_rows: int) -> tuple[KernelPool, dict[int, Recorded]]:
    """A pool, prepared, whose launchers only note their launches."""
    cache = KVCache(north(), dict.fromkeys(KVGroup, 3), dtype=torch.bfloat16)
    weights = cast(PackedWeights, SimpleNamespace(config=north(), data=torch.zeros(0)))
    by_rows: dict[int, Recorded] = {}

    def launcher(capacity: int, *_: object, **__: object) -> Recorded:
        by_rows[capacity] = Recorded(capacity, cache)
        return by_rows[capacity]

    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(pools, "build_plan", lambda config, *, rows, sms: rows)
    monkeypatch.setattr(pools, "variant_of", lambda plan: plan)
    monkeypatch.setattr(pools, "build_all", lambda variants, progress: None)
    monkeypatch.setattr(pools, "Launcher", launcher)
    pool = KernelPool(weights, cache, max_rows=max_rows, max_context=128)
    pool.prepare()
    return pool, by_rows


@pytest.mark.parametrize(("max_rows", "capacities"), [(16, [1, 2, 4, 8, 16]), (5, [1, 2, 4, 8]), (1, [1])])
def test_every_capacity_is_launched_with_as_many_rows(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, capacities: list[int]
) -> None:
    pool, by_rows = made(monkeypatch, max_rows=max_rows)
    pool.rehearse()
    assert {capacity: [len(rows) for rows in one.launches] for capacity, one in by_rows.items()} == {
        capacity: [capacity] * 4 for capacity in capacities
    }
    for one in by_rows.values():
        for rows in one.launches:
            assert {block for row in rows for table in row.tables.values() for block in table} == {0}
            assert [row.position for row in rows] == list(range(len(rows))), (
                "one sequence, each its own place"
            )


def test_rows_are_greedy_at_first_and_then_take_all_that_sampling_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, by_rows = made(monkeypatch, max_rows=16)
    pool.rehearse()
    every = sum(RowFlag) & ~RowFlag.UNCOUNTED
    for one in by_rows.values():
        assert one.flags == [0, 0, every, every]
        assert all(row.params.logit_bias for row in one.launches[-1])


def test_no_array_is_made_for_a_row_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, by_rows = made(monkeypatch, max_rows=16)
    pool.rehearse()
    for one in by_rows.values():
        before = one.inputs.addresses()
        assert all(before.values())
        one.inputs.fill(rehearsal.rows(one.capacity, VOCABULARY, rehearsal.EVERYTHING))
        assert one.inputs.addresses() == before


def test_nothing_is_left_of_it_in_pages_and_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, by_rows = made(monkeypatch, max_rows=16)
    cache = by_rows[1].cache
    for pages in cache.pages:
        pages[1:] = 2.0
    pool.rehearse()
    assert all(one.wrote for one in by_rows.values())
    for pages in cache.pages:
        assert not pages[0].any()
        assert (pages[1:] == 2.0).all()
    for one in by_rows.values():
        last = one.launches[-1]
        one.inputs.fill([replace(row, token=3, output=[*row.output, 3]) for row in last])
        flags = one.inputs._rows.host["flags"]
        assert not (flags & RowFlag.UNCOUNTED).any(), "counts of the rehearsal are gone on with"


def test_the_log_has_the_times_of_first_and_second_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, _ = made(monkeypatch, max_rows=2)
    now, costs = 0.0, iter([0.061, 0.003, 0.02, 0.004, 0.062, 0.005, 0.021, 0.006])

    def run(self: Recorded, rows: Sequence[LaunchRow], steps: int) -> Iterator[list[Sampled | None]]:
        nonlocal now
        now += next(costs)
        yield [None for _ in rows]

    monkeypatch.setattr(Recorded, "run", run)
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(perf_counter=lambda: now))
    with caplog.at_level(logging.INFO):
        pool.rehearse()
    assert caplog.messages == [
        "decode kernels were launched in 0.18 s; ms by rows: 1: 61.0, then 3.0, sampled 20.0, then 4.0; "
        "2: 62.0, then 5.0, sampled 21.0, then 6.0"
    ]


class Played(EmulatedKernel):
    """The emulated kernel as a launcher."""

    def run(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Sampled | None]]:
        for tokens in self.launch(rows, steps):
            yield [None if token is None else Sampled(token) for token in tokens]

    def forget(self) -> None:
        self._inputs.forget()


class Stuck(Played):
    """One that does not count the steps of its launches."""

    def run(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Sampled | None]]:
        yield from super().run(rows, steps, stop)
        self._epoch = self._searched = 0


# A row whose tokens are counted from launch to launch, one that searches, one that is greedy.
KINDS = (
    SamplingParams(temperature=0.8, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9),
    SamplingParams(temperature=0),
)
LENGTHS, CAPACITY = [1, 64, 200], 4


def emulated(libraries: Libraries, kind: type[Played] = Played) -> Callable[[], tuple[Bench, Any]]:
    def make() -> tuple[Bench, Any]:
        bench = libraries.bench(LENGTHS, CAPACITY)
        kernel = bench.kernel()
        cast(Any, kernel).__class__ = kind
        return bench, kernel

    return make


def on_gpu() -> tuple[Bench, Any]:
    bench = Bench(LENGTHS, CAPACITY)
    return bench, bench.kernel()


def rehearse(bench: Bench, kernel: Any) -> None:
    """Only block 0 is touched: here a sequence may hold it, so it is put back."""
    cache: KVCache = kernel._cache
    before = [pages.clone() for pages in cache.pages]
    rehearsal.rehearse({CAPACITY: kernel}, cache, VOCABULARY)
    for pages, held in zip(cache.pages, before, strict=True):
        assert not pages[0].any()
        assert torch.equal(pages[1:].nan_to_num(7.0), held[1:].nan_to_num(7.0))
        pages[0] = held[0]


def outcome(bench: Bench, kernel: Any) -> tuple[list[Tokens], Tensor]:
    """Tokens of a launch of two steps and of one that goes on with it, and the logits left by that."""
    rows = [
        replace(row, params=params, prompt=list(row.prompt), output=list(row.output))
        for row, params in zip((row for row in bench.rows if row is not None), KINDS, strict=True)
    ]
    first = list(kernel.launch(rows, 2))
    following = [
        replace(row, token=ours[-1], position=row.position + 2, output=[*row.output, *ours])
        for row, ours in zip(rows, zip(*first, strict=True), strict=True)
    ]
    return [*first, *kernel.launch(following, 1)], logits_of(kernel, bench.plan)[bench.live].cpu()


def check_what_follows(make: Callable[[], tuple[Bench, Any]]) -> None:
    """Launches after a rehearsal are those of a kernel that had none, to the bit."""
    plain, (bench, kernel) = make(), make()
    rehearse(bench, kernel)
    (tokens, logits), (right, left) = outcome(bench, kernel), outcome(*plain)
    assert tokens == right
    assert torch.equal(logits, left)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_launches_that_follow_are_what_they_would_have_been(libraries: Libraries) -> None:
    check_what_follows(emulated(libraries))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_launches_that_are_not_counted_are_seen(libraries: Libraries) -> None:
    with pytest.raises((AssertionError, EmulationError)):
        check_what_follows(emulated(libraries, Stuck))


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_launches_that_follow_on_a_gpu() -> None:
    check_what_follows(on_gpu)
