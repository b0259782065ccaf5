"""The decode figures of a results file for the README: a picture, and a table on standard output.

python -m tools.plot_decode benchmarks/results/decode-h200.json docs/images/decode-share.svg

The picture has the share of the limit over rows, and over context for one row. vLLM's share is what it would
be if it read the same bytes as we: what its time for a step makes of our share. For one row the bytes are the
same; for more they are if its router spreads tokens over as many experts as ours, which nobody counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.compare import ResultsError
from headrace.bench.points import name_of
from headrace.step.svg import FAINT, GROUND, RULE, TEXT, bar, opening, text

CONTEXT = 8192  # of the panel over rows
OURS, THEIRS = "#4477aa", "#aa3377"  # of Paul Tol's bright scheme, dark enough for words on white
WIDTH, HEIGHT = 900, 418


@dataclass(frozen=True)
class Mark:
    """A point of a panel: its name on the axis, and share of the limit and tokens/s of ours and of vLLM."""

    name: str
    share: float
    speed: float
    vllm_speed: float | None

    @property
    def vllm_share(self) -> float | None:
        """For the same bytes: of two times for them, the longer is the smaller share."""
        return None if self.vllm_speed is None else self.share * self.vllm_speed / self.speed


@dataclass(frozen=True)
class Panel:
    """Where one of the two plots lies. Marks are the same distance apart: all grow about geometrically."""

    left: float
    title: str
    below: str
    marks: Sequence[Mark]

    top: float = 132.0
    width: float = 370.0
    height: float = 230.0

    def x(self, place: int) -> float:
        return self.left + self.width * (place + 0.5) / len(self.marks)

    def y(self, share: float) -> float:
        """From 0 at the bottom, so that heights compare as the shares do."""
        return self.top + self.height * (1 - share)


def read(path: Path) -> dict[str, Any]:
    """A file of `headrace bench decode` or tools/bench_against_vllm.py. Raises ResultsError for another."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not content.get("points") or "share_of_limit" not in content["points"][0]:
        raise ResultsError(
            f"{path} has no points with a share of the limit: headrace bench decode writes them"
        )
    return content


def over_rows(points: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Those of CONTEXT tokens, fewest rows first."""
    chosen = [point for point in points if point["context"] == CONTEXT]
    return [_mark(point, str(point["rows"])) for point in sorted(chosen, key=lambda point: point["rows"])]


def over_context(points: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Those of one row, the shortest first."""
    chosen = sorted((point for point in points if point["rows"] == 1), key=lambda point: point["context"])
    return [_mark(point, name_of(1, point["context"])) for point in chosen]


def _mark(point: Mapping[str, Any], name: str) -> Mark:
    return Mark(name, point["share_of_limit"], point["tokens_per_s"], point["vllm_tokens_per_s"])


def picture(results: Mapping[str, Any]) -> str:
    """The SVG. Raises ResultsError where a panel would be empty."""
    points = results["points"]
    panels = (
        Panel(62, f"Over rows, {name_of(1, CONTEXT)} tokens of context each", "rows", over_rows(points)),
        Panel(502, "Over context, one row", "tokens of context", over_context(points)),
    )
    if not all(panel.marks for panel in panels):
        raise ResultsError(f"both panels need points: rows at {CONTEXT} tokens, and contexts of one row")
    compared = any(point["vllm_tokens_per_s"] is not None for point in points)
    parts = [opening(WIDTH, HEIGHT), *_words(results, compared)]
    for panel in panels:
        parts += [*_frame(panel), *_series(panel, compared)]
    return "".join([*parts, "</svg>\n"])


def _words(results: Mapping[str, Any], compared: bool) -> Iterator[str]:
    yield text(
        20, 32, f"Decoding {results['model']}: share of the memory-bandwidth limit", size=18, weight="bold"
    )
    limit = f"The limit: a step's bytes at {results['bandwidth'] / 1e12:g} TB/s. At the points: tokens/s."
    origin = f"{results['machine']}, {results['date']}, commit {results['commit'][:7]}."
    yield text(20, 54, f"{origin} {limit}", size=12.5, fill=FAINT)
    entries = [("headrace", OURS)]
    if compared:
        version = results["versions"].get("vllm", "")
        entries.append((f"vLLM {version}, had it read the same bytes (its experts were not counted)", THEIRS))
    x = 20.0
    for words, hue in entries:
        yield _line([(x, 76), (x + 22, 76)], hue) + _dot(x + 11, 76, hue) + text(x + 29, 80, words, size=12)
        x += 110


def _frame(panel: Panel) -> Iterator[str]:
    """Title, grid and names on the axes."""
    yield text(panel.left, panel.top - 22, panel.title, size=13.5, weight="bold")
    for fifth in range(6):
        share, y = fifth / 5, panel.y(fifth / 5)
        hue = TEXT if fifth in (0, 5) else RULE
        yield f'<path d="M{panel.left:g} {y:.1f}h{panel.width:g}" stroke="{hue}"/>\n'
        yield text(panel.left - 7, y + 4, f"{100 * share:.0f} %", anchor="end", fill=FAINT)
    for place, mark in enumerate(panel.marks):
        yield text(panel.x(place), panel.y(0) + 18, mark.name, anchor="middle")
    yield text(panel.left + panel.width / 2, panel.y(0) + 38, panel.below, anchor="middle", fill=FAINT)


def _series(panel: Panel, compared: bool) -> Iterator[str]:
    """Ours with its numbers above, vLLM's with its numbers below: the faster is the higher one."""
    ours = [(panel.x(place), panel.y(mark.share)) for place, mark in enumerate(panel.marks)]
    yield _line(ours, OURS)
    for (x, y), mark in zip(ours, panel.marks, strict=True):
        yield _dot(x, y, OURS) + _number(x, y - 10, mark.speed, OURS)
    if not compared:
        return
    theirs = [
        (panel.x(place), panel.y(mark.vllm_share), mark.vllm_speed)
        for place, mark in enumerate(panel.marks)
        if mark.vllm_share is not None and mark.vllm_speed is not None
    ]
    yield _line([(x, y) for x, y, _ in theirs], THEIRS)
    for x, y, speed in theirs:
        yield _dot(x, y, THEIRS) + _number(x, y + 20, speed, THEIRS)


def _number(x: float, y: float, speed: float, hue: str) -> str:
    """On a patch of the ground, so that no line of the grid goes through it."""
    return bar(x - 20, y - 11, 40, 13, GROUND) + text(x, y, f"{speed:,.1f}", anchor="middle", fill=hue)


def _line(places: Sequence[tuple[float, float]], hue: str) -> str:
    if len(places) < 2:
        return ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path d="M{path}" fill="none" stroke="{hue}" stroke-width="2"/>\n'


def _dot(x: float, y: float, hue: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{hue}"/>\n'


def table(results: Mapping[str, Any]) -> str:
    """All points in Markdown."""
    version = results["versions"].get("vllm", "")
    lines = [
        f"| rows | context | ms a step | tokens/s | of the limit | vLLM {version}, tokens/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in results["points"]:
        ours, theirs = point["tokens_per_s"], point["vllm_tokens_per_s"]
        compared = ("", "") if theirs is None else (f"{theirs:,.1f}", f"{ours / theirs:.2f}")
        cells = (
            str(point["rows"]),
            name_of(point["rows"], point["context"]),
            f"{point['ms_per_step']:.2f}",
            f"{ours:,.1f}",
            f"{100 * point['share_of_limit']:.1f} %",
            *compared,
        )
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("image", type=Path, help="the SVG to write")
    given = parser.parse_args(arguments)
    results = read(given.results)
    given.image.write_text(picture(results), encoding="utf-8")
    print(table(results), end="")


if __name__ == "__main__":
    main()
