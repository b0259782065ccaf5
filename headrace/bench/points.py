"""Which settings to measure: how many rows, with how much context each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.step.isa import ROW_CAPACITIES

_POINT = re.compile(r"(\d+)x(\d+)(K?)(?:\.\.(\d+)(K?))?", re.IGNORECASE)

DEFAULT_POINTS = (
    "1x8K", "2x8K", "4x8K", "8x8K", "16x8K", "1x1K", "1x32K", "1x128K", "1x256K", "8x1K..64K"
)  # fmt: skip


class PointError(ValueError):
    """What was asked for is no setting that can be measured; the message says why."""


@dataclass(frozen=True)
class Point:
    """Tokens of context of every row of a launch, the one that is fed included."""

    contexts: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.contexts)

    @property
    def context(self) -> int | list[int]:
        """One number if all rows have the same; as results files have it."""
        return self.contexts[0] if len(set(self.contexts)) == 1 else list(self.contexts)


def parse_point(text: str) -> Point:
    """ROWSxCONTEXT, such as 4x8K (K is 1,024), or ROWSxLEAST..MOST for contexts that grow from row to row.

    They grow geometrically, and so are rarely whole blocks. Raises PointError.
    """
    match = _POINT.fullmatch(text.strip())
    if match is None:
        raise PointError(f"{text!r} is not ROWSxCONTEXT: write it like 4x8K, or 8x1K..64K for a mixture")
    rows = int(match[1])
    if not 1 <= rows <= ROW_CAPACITIES[-1]:
        raise PointError(f"{text!r}: a step has 1 to {ROW_CAPACITIES[-1]} rows")
    least = _tokens(match[2], match[3])
    most = least if match[4] is None else _tokens(match[4], match[5])
    if not 1 <= least <= most:
        raise PointError(f"{text!r}: contexts must be 1 or more, the smaller one first")
    if rows == 1:
        return Point((most,))
    growth = (most / least) ** (1 / (rows - 1))
    return Point((*(round(least * growth**row) for row in range(rows - 1)), most))


def name_of(rows: int, context: int | list[int]) -> str:
    """How a point is called in tables: "8K", or the smallest and largest of a mixture."""
    if isinstance(context, list):
        return f"{_short(min(context))}..{_short(max(context))}"
    return _short(context)


def _tokens(number: str, unit: str) -> int:
    return int(number) * (1024 if unit else 1)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
