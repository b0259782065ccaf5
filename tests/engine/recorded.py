"""Parts of passes as a server on an H200 logged them, to ask a `Pace` what it would have run instead.

`parts-h200.jsonl` has a pass on each line: tokens, the position of the first, decode rows beside it, and of
every part its layers, milliseconds, and those since the part before. Two prompts of 131,000 tokens of North
Mini Code, each with what came to its server before: in run A chunks were cut to what one layer of them may
take, in run B they were not. The last layer, of which a pass needs no more than keys and values, was a layer
of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.engine.filling import Filling, Part
from headrace.engine.pace import Pace
from headrace.model.batch import Span

FULL = [layer % 4 == 0 for layer in range(49)]
HOST = 0.4  # milliseconds between two parts that are not the decode step's, as far as the log tells
REHEARSED = {
    64: 53,
    512: 55,
    2048: 70,
    8192: 169,
}  # milliseconds of passes before the first prompt, by tokens
LAST = 0.0012  # seconds of the last layer at most
_APART = 0.3  # shares of layers that see all of the past must differ so much to tell what these cost


@dataclass(frozen=True)
class Ran:
    """A part as it was recorded: layers, those of them that see all of the past, seconds."""

    layers: int
    full: int
    seconds: float
    since: float  # seconds since the part before


@dataclass(frozen=True, eq=False)
class Pass:
    tokens: int
    past: int
    rows: int
    full: Sequence[bool]
    parts: Sequence[Ran]

    @property
    def pairs(self) -> float:
        return self.tokens * (self.past + self.tokens / 2)

    def begin(self) -> Filling:
        span = Span([1] * self.tokens, self.past, {})
        return Filling([span], [], lambda layers: None, self.full, left=len(self.full))


@dataclass(frozen=True)
class Cost:
    """Seconds of a layer, those by which one is longer that sees all of the past, and of a beginning."""

    layer: float
    past: float
    beginning: float

    def of(self, full: Sequence[bool], *, first: bool) -> float:
        return len(full) * self.layer + sum(full) * self.past + first * self.beginning


@cache
def recorded(run: str, *, apart: bool = False) -> list[Pass]:
    """The passes of a run. The last layer comes with the one before, or is one of its own if `apart`."""
    lines = Path(__file__).with_name("parts-h200.jsonl").read_text().splitlines()
    return [_pass(each, apart=apart) for each in map(json.loads, lines) if each["run"] == run]


def _pass(each: dict[str, Any], *, apart: bool) -> Pass:
    full = FULL if apart else FULL[:-1]
    parts: list[Ran] = []
    done = 0
    for layers, spent, since in each["parts"]:
        layers = min(layers, len(full) - done)
        if layers:
            parts.append(Ran(layers, sum(full[done : done + layers]), spent / 1000, since / 1000))
            done += layers
        else:
            last = parts.pop()
            parts.append(Ran(last.layers, last.full, last.seconds + spent / 1000, last.since))
    return Pass(each["tokens"], each["past"], each["rows"], full, parts)


def fitted(passes: Sequence[Pass]) -> dict[Pass, Cost]:
    """What the layers of each pass cost, by least squares over its own parts but for the first one.

    Where its parts are alike they do not tell what of it is the past's: then a pair costs as in the others.
    """
    own = {each: _fit(each) for each in passes if _told(each)}
    pair = median(past / each.pairs for each, (_, past) in own.items())
    costs = {}
    for each in passes:
        later = each.parts[1:] or each.parts
        if each in own:
            layer, past = own[each]
        else:
            past = pair * each.pairs
            rest = sum(part.seconds - part.full * past for part in later)
            layer = rest / sum(part.layers for part in later)
        first = each.parts[0]
        costs[each] = Cost(layer, past, first.seconds - first.layers * layer - first.full * past)
    return costs


def _told(each: Pass) -> bool:
    shares = [part.full / part.layers for part in each.parts[1:]]
    return bool(shares) and max(shares) - min(shares) > _APART


def _fit(each: Pass) -> tuple[float, float]:
    later = each.parts[1:]
    counts = np.array([(part.layers, part.full) for part in later])
    (layer, past), *_ = np.linalg.lstsq(counts, np.array([part.seconds for part in later]))
    return float(layer), float(past)


@dataclass(frozen=True)
class Asked:
    """What a `Pace` would have run next, and seconds from token to token by that."""

    done: Pass
    before: int  # layers
    layers: int
    gap: float
    believed: str


def replay(pace: Pace, run: str, *, apart: bool = False) -> list[Asked]:
    """Ask before every part, then show the recorded one. What would have been takes as long as the pass's
    other parts tell, whatever `pace` believes."""
    for tokens, milliseconds in REHEARSED.items():
        pace.observe(prompt_tokens=tokens, prefill=milliseconds / 1000, decode=0.0, steps=0, rows=0)
    passes = recorded(run, apart=apart)
    costs = fitted(recorded(run))
    truth = dict(zip(passes, (costs[each] for each in recorded(run)), strict=True))
    asked = []
    for each in passes:
        filling = each.begin()
        steps = [part.since for part in each.parts[1:]] or [0.0]
        for number, part in enumerate(each.parts):
            before = len(each.full) - filling.left
            layers = pace.layers(filling, rows=each.rows)
            if each.rows:
                next_ones = FULL[:-1][before : before + layers]  # the last one takes next to nothing
                gap = truth[each].of(next_ones, first=not number) + median(steps)
                asked.append(Asked(each, before, layers, gap, str(pace)))
            filling.parts.append(Part(part.layers, part.full, part.seconds))
            filling.left -= part.layers
            seconds = pace.observe_part(filling)
            step = steps[min(number, len(steps) - 1)]
            pace.observe(
                prompt_tokens=0 if filling.left else each.tokens,
                prefill=seconds,
                decode=max(0.0, step - HOST / 1000),
                steps=bool(each.rows),
                rows=each.rows,
            )
    return asked
