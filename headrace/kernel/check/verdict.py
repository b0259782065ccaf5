"""What became of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One comparison: passed if `figure` is at most `bound`. `note` says why there is no figure (NaN)."""

    name: str
    figure: float
    bound: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """A figure that is no number never passes."""
        return self.figure <= self.bound

    def as_json(self) -> dict[str, Any]:
        """As results files have it; JSON has no infinities."""
        figure = self.figure if math.isfinite(self.figure) else None
        return {"name": self.name, "passed": self.passed, "figure": figure, "bound": self.bound} | (
            {"note": self.note} if self.note else {}
        )

    def __str__(self) -> str:
        found = self.note or f"{self.figure:.4g}, at most {self.bound:g}"
        return f"{'ok    ' if self.passed else 'FAILED'}  {self.name}: {found}"


def failed(name: str, bound: float, why: str) -> Check:
    """A check that came to no figure."""
    return Check(name, math.nan, bound, why)
