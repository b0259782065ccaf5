"""What a step should cost: a simulation of loaders, rings, consumers and counters, with measured constants.

Each SM's loader copies the pages of its tasks into a ring, in order, and runs ahead as far as ring, cap and
its own waits allow. The consumers take page after page, wait where a task waits, and publish. Of memory there
are a latency and, for every SM, an equal share of the bandwidth. Of arithmetic there is a time for each page.

What is left out: that more than three pages in flight on every SM only lengthen the queues of memory (so do
not ask about larger caps), whatever epilogues cost, and that SMs are not all equally far from memory.

Nothing here is fitted to a case: constants are those of single measurements (see `Costs`), so that what
the prediction misses is worth a look. Times are microseconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from headrace.step.isa import PAGE_BYTES_MAX

DATASHEET_BANDWIDTH = 4.8e6  # bytes a microsecond: the limit that shares are of (H200)
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured on an H200, each by itself, by programs that are older than the kernel and not kept here.

    bandwidth      of bulk copies into rings, by pages of 16 KB in flight on an SM: 2, 3, more
    latency        of a page: 32 KB in flight on each of 132 SMs give 4.2 TB/s (Little's law). Storing results
                   and reading activations back take as long, since they queue behind pages
    hop            from a signal to when the last SM sees it, pages in flight
    page           how long the consumers need for 16 KB
    choice         from seeing the router's logits to knowing the experts: 1,500 cycles
    groups         of consumers, which take pages in turn
    held           a group gives a page back only when it takes its next (asynchronous wgmma reads)
    blocking       consumers stand still until their result has left; else a publisher of its own sees to it
    """

    bandwidth: tuple[float, float, float] = (4.2e6, 4.55e6, 4.63e6)
    latency: float = 2 * PAGE_BYTES_MAX * 132 / 4.2e6
    hop: float = 1.0
    page: float = 0.070
    choice: float = 0.75
    groups: int = 2
    held: bool = False
    blocking: bool = False

    def bandwidth_of(self, in_flight: int) -> float:
        """Bytes a microsecond of all SMs together, each with so many pages under way."""
        return self.bandwidth[min(max(in_flight - 2, 0), 2)]


@dataclass(frozen=True, slots=True)
class Event:
    """A counter in one step, and what must have arrived there."""

    step: int
    counter: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class Work:
    """One task on one SM, as far as time goes.

    `loader` is what its loader waits for; with `chooses` it then picks experts. `publishes` says that a
    result goes out before the signal.
    """

    name: str
    layer: int
    step: int
    pages: int
    page_bytes: int
    waits: tuple[Event, ...] = ()
    loader: Event | None = None
    chooses: bool = False
    signal: tuple[int, int] | None = None
    publishes: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """When a task was under way: its pages, its waiting, its computing, and when its signal was given.

    `loading` is from the first page's issue to the last one's landing (0, 0 without pages).
    """

    work: Work
    loading: tuple[float, float]
    waiting: float
    begin: float
    end: float


@dataclass
class Timeline:
    """What every SM did, in order; and when each of its pages was issued, landed and given back."""

    spans: list[list[Span]]
    ring_pages: int
    issues: list[list[float]]
    landings: list[list[float]]
    releases: list[list[float]]

    def end_of(self, step: int) -> float:
        """When the last SM ended the last task of a step."""
        return max(span.end for spans in self.spans for span in spans if span.work.step == step)

    def bytes_of(self, step: int) -> int:
        """What all SMs read in a step."""
        works = (span.work for spans in self.spans for span in spans if span.work.step == step)
        return sum(work.pages * work.page_bytes for work in works)

    @cached_property
    def steps(self) -> int:
        return 1 + max(span.work.step for spans in self.spans for span in spans)

    @property
    def begin(self) -> float:
        """When the last step begins: the end of the one before, whose last moments its first pages use."""
        return self.end_of(self.steps - 2) if self.steps > 1 else 0.0

    @property
    def step_time(self) -> float:
        """Of the last step."""
        return self.end_of(self.steps - 1) - self.begin

    @property
    def share(self) -> float:
        """What part of the datasheet's bandwidth the last step reaches."""
        return self.bytes_of(self.steps - 1) / self.step_time / DATASHEET_BANDWIDTH


class StandstillError(RuntimeError):
    """Tasks wait for signals that never come."""


def simulate(works: Sequence[Sequence[Work]], *, ring_pages: int, in_flight: int, costs: Costs) -> Timeline:
    """Run every SM's list. Raises StandstillError for lists that wait for each other."""
    counters = _Counters(works)
    share = costs.bandwidth_of(in_flight) / len(works)
    sms = [_SM(list_, share, ring_pages, in_flight, costs) for list_ in works]
    left = sum(len(list_) for list_ in works)
    while left:
        done = sum(sm.run(counters) for sm in sms)
        if not done:
            raise StandstillError(f"{left} tasks wait for signals that never come")
        left -= done
    return Timeline(
        spans=[sm.spans for sm in sms],
        ring_pages=ring_pages,
        issues=[sm.issues for sm in sms],
        landings=[sm.landed for sm in sms],
        releases=[sm.freed for sm in sms],
    )


class _Counters:
    """When each counter of each step was complete: once all its signals are known."""

    def __init__(self, works: Sequence[Sequence[Work]]) -> None:
        self._missing: dict[tuple[int, int], int] = {}
        self._latest: dict[tuple[int, int], float] = {}
        for list_ in works:
            for work in list_:
                if work.signal:
                    key = (work.step, work.signal[0])
                    self._missing[key] = self._missing.get(key, 0) + work.signal[1]

    def add(self, step: int, signal: tuple[int, int], time: float) -> None:
        key = (step, signal[0])
        self._missing[key] -= signal[1]
        self._latest[key] = max(self._latest.get(key, 0.0), time)

    def time(self, event: Event) -> float:
        """NEVER as long as it is not known. What came before the first step has been there always."""
        if event.step < 0:
            return 0.0
        key = (event.step, event.counter)
        return self._latest.get(key, NEVER) if self._missing.get(key) == 0 else NEVER


@dataclass
class _SM:
    """One SM's progress. Pages are counted from the beginning: `landed[i]`, `freed[i]`."""

    works: Sequence[Work]
    share: float
    ring: int
    cap: int
    costs: Costs
    spans: list[Span] = field(default_factory=list)
    issues: list[float] = field(default_factory=list)
    landed: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)
    issued: float = 0.0
    now: float = 0.0
    seen: set[tuple[int, int]] = field(default_factory=set)

    def run(self, counters: _Counters) -> int:
        """Do tasks until one must wait for something that is not known yet; how many were done."""
        done = 0
        while len(self.spans) < len(self.works) and self._next(self.works[len(self.spans)], counters):
            done += 1
        return done

    def _next(self, work: Work, counters: _Counters) -> bool:
        gate = 0.0
        if work.loader is not None:
            gate = counters.time(work.loader) + self.costs.hop
            gate += self.costs.choice if work.chooses else 0.0
        ready = max((counters.time(event) for event in work.waits), default=0.0)
        if NEVER in (gate, ready):
            return False
        begin = self._inputs(work, ready)
        first = len(self.landed)
        end = self._stream(work, gate, begin)
        loading = (self.issues[first], self.landed[-1]) if work.pages else (0.0, 0.0)
        self.spans.append(Span(work, loading, self.now, begin, end))
        sent = end + self.costs.latency if work.publishes else end
        self.now = sent if self.costs.blocking else end
        if work.signal:
            counters.add(work.step, work.signal, sent)
        if self.costs.held:  # a task that ends gives its last pages back
            for page in range(max(first, len(self.freed) - self.costs.groups), len(self.freed)):
                self.freed[page] = end
        return True

    def _inputs(self, work: Work, ready: float) -> float:
        """When a task can begin: inputs that came with a signal not seen before are read first."""
        new = {(event.step, event.counter) for event in work.waits} - self.seen
        if not new:
            return self.now
        self.seen |= new
        return max(self.now, ready + self.costs.hop) + self.costs.latency

    def _stream(self, work: Work, gate: float, begin: float) -> float:
        """Load and consume the pages; gives the time when the last one is done with."""
        costs, landed, freed, ring, cap = self.costs, self.landed, self.freed, self.ring, self.cap
        latency, groups, held = costs.latency, costs.groups, costs.held
        transfer = work.page_bytes / self.share
        busy = costs.page * work.page_bytes / PAGE_BYTES_MAX * groups
        free_at = [begin] * groups
        issue, end = max(self.issued, gate), begin
        start = len(landed)
        last = landed[-1] if landed else 0.0
        for page in range(start, start + work.pages):  # plain comparisons: a million pages pass here
            if page >= ring and freed[page - ring] > issue:
                issue = freed[page - ring]
            if page >= cap and landed[page - cap] > issue:
                issue = landed[page - cap]
            self.issues.append(issue)
            last = last + transfer if last + transfer > issue + latency else issue + latency
            landed.append(last)
            group = (page - start) % groups
            taken = last if last > free_at[group] else free_at[group]
            done = free_at[group] = taken + busy
            end = done if done > end else end
            freed.append(NEVER if held else done)
            if held and page - start >= groups:
                freed[page - groups] = taken
        self.issued = issue
        return end
