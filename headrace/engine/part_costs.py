"""What parts of a pass cost, where its layers are run in several steps.

On the H200, behind 90,000 tokens a layer that sees all of them took 26 ms where the others took 4, and the
first part of a pass up to 13 ms more than its layers if no pass of so many tokens had come before. So a part
is not as dear as the mean of a pass says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import inf, sqrt
from statistics import median

from headrace.engine.filling import Filling, Part
from headrace.engine.line import Point, steepness
from headrace.model.tiled import TILE

_PARTS = 24  # the newest, which the cost of the past is learnt from
_PAST = 8192  # tokens: layers that see all of a shorter one hardly take longer, which chance would hide
_BEGINNINGS = 16  # the newest passes of a kind, of which the dearest beginning is allowed for
_NEWEST = 4  # parts of a pass that tell what its layers take
_SURE = 0.88  # of the room is planned: the rest is for chance, and for what is between a part and its step
_OWN = 0.55  # share of a pass that may be its own cost, and not its tokens': prompts take too long else
_LEAST = 0.1  # a pass would cost this share of its time at least if there were no past, whatever noise says


class PartCosts:
    """seconds = beginning (of a pass's first part) + layers * layer + full * pairs * pair

    where `full` of the layers see all of the past, with so many pairs of a token and what it sees. What a
    pair costs is much the same in all passes, and told by parts of one pass that have more of such layers
    than others. What a layer costs else, and the beginning, depend on the pass: its own parts tell.
    """

    def __init__(self) -> None:
        self.pair = 0.0
        self._full: Sequence[bool] = ()  # of every layer of a pass, whether it sees all of the past
        # Pairs for each layer of a part and the seconds of one, by what they may be compared with: parts of
        # the same pass, or passes at once of as many tokens. Else layers themselves differ, or the beginning.
        self._points: deque[tuple[tuple[int, int], Point]] = deque(maxlen=_PARTS)
        self._passes = 0
        self._before = 1, 0.0  # tokens of the newest complete pass, and what a layer of it cost
        # Of passes of whole tiles and of others: these need not be of a size that has come before.
        self._beginnings: dict[bool, deque[float]] = {
            whole: deque(maxlen=_BEGINNINGS) for whole in (True, False)
        }

    def __str__(self) -> str:
        """What has been learnt, for the log."""
        whole, other = (1e3 * max(self._beginnings[kind], default=0.0) for kind in (True, False))
        past = 1e12 * self.pair
        return f"its beginning {whole:.1f} ms or {other:.1f} of other sizes, its past {past:.1f} ps a pair"

    def fitting(self, filling: Filling, *, room: float, layer: float) -> int:
        """How many of the next layers of a pass may run in `room` seconds, where one of those that do not see
        all of the past is expected to cost `layer`, until parts of the pass tell. One may in any case."""
        spent = 0.0 if filling.parts else max(self._begun(filling), default=room)
        layer = self._layer(filling, layer)
        room *= _SURE
        for count, full in enumerate(filling.full[-filling.left :]):
            spent += layer + full * self._past(filling)
            if spent > room:
                return max(1, count)
        return filling.left

    def tokens(self, *, room: float, past: int, fixed: float, slope: float) -> float:
        """How many tokens after a `past` of so many a pass may have for each of its layers to run in `room`
        seconds, where it costs fixed + slope * tokens besides what its past does.

        The first layer comes with the beginning that is usual for whole tiles, which is left out where no
        pass would be short enough. No pass is to be so small that more than _OWN of what it costs is `fixed`,
        whatever its layers take.
        """
        if not self._full:
            return inf
        left = _SURE * room - fixed / len(self._full)
        beginning = median(self._beginnings[True] or [0.0])
        if self._full[0] and beginning < left:
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
        self._passes += not later
        if not later and filling.left:  # how much of it was the beginning is not known
            return
        if filling.pairs >= _PAST * filling.tokens:
            self._compare(filling, at_once=not later)
        if later and not filling.left:
            layer = max(0.0, self._rest(filling, later) / sum(part.layers for part in later))
            self._before = filling.tokens, layer
            self._begun(filling).append(max(0.0, self._rest(filling, [first]) - first.layers * layer))

    def _compare(self, filling: Filling, *, at_once: bool) -> None:
        """Learn what a pair costs from the part of a pass that was run last."""
        last = filling.parts[-1]
        seen = filling.pairs * last.full / last.layers
        kind = (filling.tokens, 0 if at_once else self._passes)
        self._points.append((kind, (seen, last.seconds / last.layers)))
        pairs = (
            (one, other)
            for (kind, one), (another, other) in combinations(sorted(self._points), 2)
            if kind == another
        )
        self.pair = max(0.0, steepness(pairs, self.pair))

    def _begun(self, filling: Filling) -> deque[float]:
        """Beginnings of passes of its kind."""
        return self._beginnings[filling.tokens % TILE == 0]

    def _past(self, filling: Filling) -> float:
        """What a layer that sees all of the past costs more than the others."""
        return filling.pairs * self.pair

    def _rest(self, filling: Filling, parts: list[Part]) -> float:
        return sum(part.seconds - part.full * self._past(filling) for part in parts)

    def _layer(self, filling: Filling, expected: float) -> float:
        """What one layer costs but for the past, as the newest parts of the pass tell.

        As long as there is none but the first, layers take what is `expected`, not less for a token than in
        the pass before, and not less than in the first: if that was long for its beginning, the second tells.
        """
        newest = filling.parts[1:][-_NEWEST:] or filling.parts
        told = self._rest(filling, newest) / sum(part.layers for part in newest) if newest else 0.0
        if len(filling.parts) > 1:
            return max(0.0, told)
        tokens, layer = self._before
        return max(expected, told, layer * min(1.0, filling.tokens / tokens))


def _fitting(seconds: float, *, each: float, pair: float) -> float:
    """How many tokens take so many seconds, where one costs `each`, and `pair` for every one before it."""
    return 2 * seconds / (each + sqrt(each**2 + 2 * pair * seconds)) if seconds > 0 else 0.0
