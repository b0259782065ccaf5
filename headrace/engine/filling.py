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
    """A pass over `chunks` of `owners`. `left` of its layers are still to be run, by `advance`.

    `seconds` is what it has taken so far, `layer` what one of the layers did that were run last. Until it is
    complete nothing is computed of a chunk, and its blocks must stay its owner's: a pass that has lost one of
    them is given up.
    """

    chunks: Sequence[Span]
    owners: Sequence[Running]
    advance: Callable[[int], None]
    left: int
    seconds: float = 0.0
    layer: float | None = None

    @staticmethod
    def of(prefiller: Prefiller, chunks: Sequence[Span], owners: Sequence[Running]) -> Filling:
        """A pass that begins; one of a prefiller that cannot stop between layers has only one."""
        if isinstance(prefiller, LayeredPrefiller):
            return Filling(chunks, owners, prefiller.begin(chunks), prefiller.layers)
        return Filling(chunks, owners, lambda layers: prefiller.prefill(chunks), 1)

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
        self.advance(layers)
        spent = time.perf_counter() - begun
        self.seconds += spent
        self.layer = spent / layers
        self.left -= layers
        if self.left:
            return False
        for span, sequence in zip(self.chunks, self.owners, strict=True):
            sequence.computed = span.end
        return True
