"""A backend that computes nothing, to measure what the host costs, and to test the engine fast.

Its tokens are a fixed function of position, so what the engine should make of them is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.model.batch import Span
from headrace.model.sampler import Sampled


class NullBackend:
    """Gives token `position % vocab_size` for the row whose new token stands at `position`."""

    name = "null"
    takes_several_rows = True

    def __init__(self, *, vocab_size: int, max_rows: int, max_steps: int) -> None:
        self.max_rows = max_rows
        self.max_steps = max_steps
        self._vocab_size = vocab_size

    def prepare(self) -> None:
        """Nothing to get ready."""

    def prefill(self, chunks: Sequence[Span]) -> None:
        """Nothing to fill."""

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        live = [True] * len(rows)
        for step in range(steps):
            made: list[Sampled | None] = [None] * len(rows)
            for index, row in enumerate(rows):
                if live[index]:
                    token = (row.position + step + 1) % self._vocab_size
                    made[index] = Sampled(token, None)
                    live[index] = not row.ends(token, step + 1)
            yield made
            if not any(live) or interrupt.is_set():
                return
