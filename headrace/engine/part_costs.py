"""What parts of a pass cost, where its layers are run in several steps.

On the H200, a first part took up to 25 ms more than its layers did later, and behind 90,000 tokens a layer
that sees all of them took 26 ms where the others took 6. So a part is not as dear as the mean of a pass says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import inf, sqrt
from statistics import median

from headrace.engine.filling import Filling, Part

_PARTS = 24  # the newest, which the cost of the past is learnt from
_BEGINNINGS = 16  # the newest passes, of which the dearest beginning is allowed for
_LATER = 3  # the newest passes that were not a prompt's first, likewise, where chunks are sized
_SURE = 0.88  # of the room is planned: one part in a hundred took 14 % more than foreseen
_OWN = 0.55  # share of a pass that may be its own cost, and not its tokens': prompts take too long else
_LEAST = 0.1  # a pass would cost this share of its time at least if there were no past, whatever noise says


# Tokens of a pass and whether it was run at once, pairs for each of the layers, and the seconds of one.
Point = tuple[tuple[int, bool], float, float]


class PartCosts:
    """seconds = beginning (of a pass's first part) + layers * layer + full * pairs * pair

    where `full` of the layers see all of the past, with so many pairs of a token and what it sees. What a
    layer costs else depends on the pass: the part before tells.
    """

    def __init__(self) -> None:
        self.pair = 0.0
        self._full: Sequence[bool] = ()  # of every layer of a pass, whether it sees all of the past
        self._points: deque[Point] = deque(maxlen=_PARTS)
        self._beginnings: deque[float] = deque(maxlen=_BEGINNINGS)
        self._later: deque[float] = deque(maxlen=_LATER)

    def __str__(self) -> str:
        """What has been learnt, for the log."""
        beginning = max(self._beginnings, default=0.0)
        return f"its beginning {1e3 * beginning:.1f} ms, its past {1e12 * self.pair:.1f} ps a pair"

    def fitting(self, filling: Filling, *, room: float, layer: float) -> int:
        """How many of the next layers of a pass may run in `room` seconds, where one of those that do not see
        all of the past costs `layer` or what it did in the part before. One may in any case."""
        if filling.parts:
            spent, layer = 0.0, max(layer, self._layer(filling))
        else:
            spent = max(self._beginnings, default=room)
        room *= _SURE
        for count, full in enumerate(filling.full[-filling.left :]):
            spent += layer + full * self._past(filling)
            if spent > room:
                return max(1, count)
        return filling.left

    def tokens(self, *, room: float, past: int, fixed: float, slope: float) -> float:
        """How many tokens after a `past` of so many a pass may have for each of its layers to run in `room`
        seconds, where it costs fixed + slope * tokens besides what its past does.

        The first layer comes with the beginning, which is left out where no pass would be short enough. No
        pass is to be so small that more than _OWN of what it costs is `fixed`, whatever its layers take.
        """
        if not self._full:
            return inf
        left = _SURE * room - fixed / len(self._full)
        beginning = max(self._later, default=0.0) if self._full[0] else 0.0
        if beginning < left:
            left -= beginning
        each = slope / len(self._full) + self.pair * past
        fitting = _fitting(left, each=each, pair=self.pair)
        worth = fixed * (1 - _OWN) / _OWN / (slope + sum(self._full) * self.pair * past)
        return max(fitting, worth)

    def of_pass(self, *, seconds: float, past: int, fixed: float, slope: float) -> float:
        """How many tokens after a `past` of so many a pass may have to take so many `seconds` in all."""
        pair = sum(self._full) * self.pair
        return _fitting(seconds - fixed, each=slope + pair * past, pair=pair)

    def bare(self, filling: Filling) -> float:
        """Seconds of a pass that is complete, had its tokens no past and did not see each other."""
        past = sum(filling.full) * self._past(filling)
        return max(filling.seconds - past, _LEAST * filling.seconds)

    def observe(self, filling: Filling) -> None:
        """Learn from the part of a pass that was run last."""
        self._full = filling.full
        first, *later = filling.parts
        if not later and filling.left:  # how much of it was the beginning is not known
            return
        last = filling.parts[-1]
        seen = filling.pairs * last.full / last.layers
        self._points.append(((filling.tokens, not later), seen, last.seconds / last.layers))
        self.pair = max(0.0, _slope(list(self._points), self.pair))
        if later and not filling.left:
            layer = self._rest(filling, later) / sum(part.layers for part in later)
            self._beginnings.append(max(0.0, self._rest(filling, [first]) - first.layers * layer))
            if all(span.start for span in filling.chunks):
                self._later.append(self._beginnings[-1])

    def _past(self, filling: Filling) -> float:
        """What a layer that sees all of the past costs more than the others."""
        return filling.pairs * self.pair

    def _rest(self, filling: Filling, parts: list[Part]) -> float:
        return sum(part.seconds - part.full * self._past(filling) for part in parts)

    def _layer(self, filling: Filling) -> float:
        """What one layer cost in the last part, but for the past, and in a first part for a usual beginning:
        whether more than that was the beginning's or the layers' is told by the second, a small one then."""
        last = filling.parts[-1]
        rest = self._rest(filling, [last])
        if len(filling.parts) == 1 and self._beginnings:
            rest -= median(self._beginnings)
        return rest / last.layers


def _fitting(seconds: float, *, each: float, pair: float) -> float:
    """How many tokens take so many seconds, where one costs `each`, and `pair` for every one before it."""
    return 2 * seconds / (each + sqrt(each**2 + 2 * pair * seconds)) if seconds > 0 else 0.0


def _slope(points: list[Point], default: float) -> float:
    """The slope of least absolute differences: the median of the slopes of all pairs of points, each with the
    weight of their distance. Both are of one kind: else the layers themselves differ, or the beginning."""
    slopes = sorted(
        ((late - early) / (more - fewer), more - fewer)
        for (kind, fewer, early), (other, more, late) in combinations(sorted(points), 2)
        if kind == other and more > fewer
    )
    left = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        left -= weight
        if left <= 0:
            return slope
    return default
