"""A pass that fills chunks of prompts, some layers in a step, so that answers need not wait for all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.engine.backend import LayeredPrefiller, Prefiller
from headrace.engine.sequence import Sequence as Running
from headrace.model.batch import Span


@dataclass(eq=False, slots=True)
class Filling:
    """A pass over `chunks` of `owners`. `left` of its `layers` are still to be run, by `advance`.

    `seconds` is what it has taken so far, `layer` what one of the `ran` layers did that were run last,
    `between` seconds after those before. Until it is
    complete nothing is computed of a chunk, and its blocks must stay its owner's: a pass that has lost one of
    them is given up.
    """

    chunks: Sequence[Span]
    owners: Sequence[Running]
    advance: Callable[[int], None]
    layers: int
    left: int
    seconds: float = 0.0
    layer: float | None = None
    ran: int = 0
    between: float = 0.0
    _ended: float | None = None

    @staticmethod
    def of(prefiller: Prefiller, chunks: Sequence[Span], owners: Sequence[Running]) -> Filling:
        """A pass that begins; one of a prefiller that cannot stop between layers has only one."""
        if isinstance(prefiller, LayeredPrefiller):
            layers = prefiller.layers
            return Filling(chunks, owners, prefiller.begin(chunks), layers, left=layers)
        return Filling(chunks, owners, lambda layers: prefiller.prefill(chunks), 1, left=1)

    def __str__(self) -> str:
        """The layers that were run last, for the log."""
        first = self.chunks[0]
        return (
            f"prompt: {self.tokens} tokens from {first.start} on, {self.ran} layers in "
            f"{1e3 * self.ran * (self.layer or 0.0):.1f} ms, {self.left} left, "
            f"{1e3 * self.seconds:.1f} ms so far; {1e3 * self.between:.1f} ms since those before"
        )

    @property
    def tokens(self) -> int:
        return sum(len(span.tokens) for span in self.chunks)

    @property
    def seconds_left(self) -> float:
        """How long the rest will take."""
        return self.left * (self.layer or 0.0)

    def run(self, layers: int) -> bool:
        """Run the next `layers` layers; whether they were the last. Then the chunks are computed."""
        begun = time.perf_counter()
        self.between = begun - (self._ended or begun)
        self.advance(layers)
        self._ended = time.perf_counter()
        spent = self._ended - begun
        self.seconds += spent
        self.layer, self.ran = spent / layers, layers
        self.left -= layers
        if self.left:
            return False
        for span, sequence in zip(self.chunks, self.owners, strict=True):
            sequence.computed = span.end
        return True
