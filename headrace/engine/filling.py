"""A pass that fills chunks of prompts, some layers in a step, so that answers need not wait for all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.engine.backend import LayeredPrefiller, Prefiller
from headrace.engine.sequence import Sequence as Running
from headrace.model.batch import Span


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a pass that were run at once; `full` of them see all of the past."""

    layers: int
    full: int
    seconds: float


@dataclass(eq=False, slots=True)
class Filling:
    """A pass over `chunks` of `owners`. `left` of its layers are still to be run, by `advance`.

    `full` says of every layer whether it sees all of the past, `parts` what was run so far, the last of them
    `between` seconds after the one before. For `off` seconds of that one the thread did not run: another had
    the interpreter, or another process the CPU. (Who waits for the GPU looks at it all the time.)

    Until the pass is complete nothing is computed of a chunk, and its blocks must stay its owner's: a pass
    that has lost one of them is given up.
    """

    chunks: Sequence[Span]
    owners: Sequence[Running]
    advance: Callable[[int], None]
    full: Sequence[bool]
    left: int
    parts: list[Part] = field(default_factory=list)
    between: float = 0.0
    off: float = 0.0
    _ended: float | None = None

    @staticmethod
    def of(prefiller: Prefiller, chunks: Sequence[Span], owners: Sequence[Running]) -> Filling:
        """A pass that begins; one of a prefiller that cannot stop between layers has only one."""
        if isinstance(prefiller, LayeredPrefiller):
            return Filling(chunks, owners, prefiller.begin(chunks), prefiller.full, prefiller.layers)
        return Filling(chunks, owners, lambda layers: prefiller.prefill(chunks), [True], left=1)

    def __str__(self) -> str:
        """The layers that were run last, for the log."""
        first, last = self.chunks[0], self.parts[-1]
        return (
            f"prompt: {self.tokens} tokens from {first.start} on, {last.layers} layers in "
            f"{1e3 * last.seconds:.1f} ms, {self.left} left, "
            f"{1e3 * self.seconds:.1f} ms so far; {1e3 * self.between:.1f} ms since those before, "
            f"{1e3 * self.off:.1f} ms off the CPU"
        )

    @property
    def tokens(self) -> int:
        return sum(len(span.tokens) for span in self.chunks)

    @property
    def pairs(self) -> float:
        """In a layer that sees all of the past, the pairs of a token and a position that it sees."""
        return sum(len(span.tokens) * (span.start + span.end) / 2 for span in self.chunks)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return sum(part.seconds for part in self.parts)

    @property
    def seconds_left(self) -> float:
        """How long the rest will take."""
        return self.left * self.parts[-1].seconds / self.parts[-1].layers if self.parts else 0.0

    def run(self, layers: int) -> bool:
        """Run the next `layers` layers; whether they were the last. Then the chunks are computed."""
        full = sum(self.full[-self.left :][:layers])
        begun, running = time.perf_counter(), time.thread_time()
        self.between = begun - (self._ended or begun)
        self.advance(layers)
        self._ended = time.perf_counter()
        self.off = max(0.0, self._ended - begun - (time.thread_time() - running))
        self.parts.append(Part(layers, full, self._ended - begun))
        self.left -= layers
        if self.left:
            return False
        for span, sequence in zip(self.chunks, self.owners, strict=True):
            sequence.computed = span.end
        return True
