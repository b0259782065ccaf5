"""Costs that grow along with something, told by measurements some of which may be far off."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import combinations
from statistics import median

_SPREAD = 0.1  # sizes of two chunks must differ by this share of the larger to tell the two costs apart
_CHUNKS = 16  # the newest, which costs are learnt from
_OTHERS = 3  # of those are to differ from the usual size: one alone may have been an accident
_NEWEST = 3  # chunks, of which one may be far off
_FLATTEST = 0.1  # a token costs this share of its part in the cheapest chunk at least, whatever noise says

Point = tuple[float, float]  # how much of it there was, and the seconds


def steepness(pairs: Iterable[tuple[Point, Point]], default: float = 0.0) -> float:
    """Seconds for each: the median of the slopes of all pairs (Theil, 1950; Sen, 1968), each with the weight
    of its distance (Jaeckel, 1972), as near points tell little. Those that were far off do not move it while
    they are few. `default` if no two points differ."""
    slopes = sorted(
        ((late - early) / (more - fewer), more - fewer)
        for (fewer, early), (more, late) in pairs
        if more > fewer
    )
    left = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        left -= weight
        if left <= 0:
            return slope
    return default


class Line:
    """seconds = fixed + slope * tokens, fitted to the newest chunks.

    Its slope is the `steepness` of the points, the newest chunks say how high it lies.
    """

    def __init__(self) -> None:
        self.fixed = self.slope = 0.0
        self.parted = False  # whether chunks of different sizes have been seen
        self._newest: deque[tuple[int, float]] = deque(maxlen=_CHUNKS)

    @property
    def known(self) -> bool:
        """Whether a chunk has been seen."""
        return bool(self._newest)

    @property
    def alike(self) -> bool:
        """Whether so many chunks are of one size that the two costs may no longer be told apart."""
        usual = median(tokens for tokens, _ in self._newest)
        others = sum(abs(tokens - usual) > _SPREAD * max(tokens, usual) for tokens, _ in self._newest)
        return self.parted and len(self._newest) == _CHUNKS and others < _OTHERS

    def of(self, tokens: int) -> float:
        """What a chunk of so many tokens costs."""
        return self.fixed + self.slope * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk of so many tokens."""
        self._newest.append((tokens, seconds))
        newest = list(self._newest)[-_NEWEST:]
        pairs = [
            (few, many)
            for few, many in combinations(sorted(self._newest), 2)
            if many[0] - few[0] > _SPREAD * many[0]
        ]
        if pairs:
            self.parted = True
            whole = median(spent / count for count, spent in newest)
            flattest = _FLATTEST * min(spent / count for count, spent in self._newest)
            self.slope = min(max(steepness(pairs), flattest), whole)
            self.fixed = max(0.0, median(spent - self.slope * count for count, spent in newest))
        elif self.parted:  # alike as they are, chunks only tell that both costs have changed
            factor = median(spent / self.of(count) for count, spent in newest)
            self.fixed, self.slope = self.fixed * factor, self.slope * factor
        else:
            self.slope = median(spent / count for count, spent in newest)
