"""The README's decode figures: drawn true to scale, and from the results that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.bench.compare import ResultsError
from tools.plot_decode import OURS, THEIRS, main, over_context, over_rows, picture, read, table

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decode-h200.json"
SVG = "{http://www.w3.org/2000/svg}"
REDRAW = "python -m tools.plot_decode benchmarks/results/decode-h200.json docs/images/decode-share.svg"


def point(rows: int, context: int | list[int], share: float, vllm: float | None = None) -> dict[str, Any]:
    """Of a model of 1 GB a step at 1 TB/s, so that the limit is a millisecond."""
    return {
        "rows": rows,
        "context": context,
        "ms_per_step": 1 / share,
        "tokens_per_s": 1000 * rows * share,
        "bytes": 1e9,
        "share_of_limit": share,
        "vllm_tokens_per_s": vllm,
    }


def results_of(*points: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-01-02",
        "machine": "A <GPU>",
        "commit": "0123456789",
        "versions": {"vllm": "1.2.3"},
        "model": "a-model",
        "bandwidth": 1e12,
        "points": list(points),
    }


SOME = results_of(
    point(4, 8192, 0.75, 1000.0),
    point(1, 8192, 0.5, 125.0),
    point(1, 32768, 0.6),
    point(1, 1024, 0.4),
    point(2, [1024, 8192], 0.9, 1.0),
)


def circles(svg: str, hue: str) -> list[tuple[float, float]]:
    found = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}circle") if one.get("fill") == hue]
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in found][1:]  # less the legend's


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def grid(svg: str, share: str) -> float:
    """How high the line of a share is: its name stands 4 pixels lower."""
    places = [one for one in ElementTree.fromstring(svg).iter(f"{SVG}text") if one.text == share]
    return float(places[0].attrib["y"]) - 4


def test_a_panel_has_its_points_in_order_and_no_others() -> None:
    assert [(mark.name, mark.share) for mark in over_rows(SOME["points"])] == [("1", 0.5), ("4", 0.75)]
    contexts = [(mark.name, mark.share) for mark in over_context(SOME["points"])]
    assert contexts == [("1K", 0.4), ("8K", 0.5), ("32K", 0.6)]


def test_vllm_has_the_share_that_our_bytes_in_its_time_come_to() -> None:
    one, four = over_rows(SOME["points"])
    assert one.vllm_share == pytest.approx(1e9 / 1e12 / (1 / 125))
    assert four.vllm_share == pytest.approx(1e9 / 1e12 / (4 / 1000))
    assert over_context(SOME["points"])[0].vllm_share is None


def test_points_are_as_high_as_their_shares() -> None:
    svg = picture(SOME)
    bottom, top = grid(svg, "0 %"), grid(svg, "100 %")
    heights = [(bottom - y) / (bottom - top) for _, y in circles(svg, OURS)]
    assert heights == pytest.approx([0.5, 0.75, 0.4, 0.5, 0.6], abs=0.001)
    assert [(bottom - y) / (bottom - top) for _, y in circles(svg, THEIRS)] == pytest.approx(
        [0.125, 0.25, 0.125], abs=0.001
    )
    places = [x for x, _ in circles(svg, OURS)]
    assert places == sorted(places)


def test_it_says_what_was_measured() -> None:
    said = texts(picture(SOME))
    assert (
        "A <GPU>, 2026-01-02, commit 0123456. The limit: a step's bytes at 1 TB/s. At the points: tokens/s."
        in said
    )
    assert {"500.0", "3,000.0", "125.0", "1,000.0", "1", "4", "1K", "8K", "32K"} <= set(said)
    assert any(words.startswith("vLLM 1.2.3") for words in said)


def test_without_vllm_it_is_not_spoken_of() -> None:
    alone = results_of(point(1, 8192, 0.5))
    svg = picture(alone)
    assert not any("vLLM" in words for words in texts(svg))
    assert THEIRS not in svg


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"date": "2026-01-02", "points": [{"rows": 1}]}))
    with pytest.raises(ResultsError, match="no points with a share"):
        read(other)
    with pytest.raises(ResultsError, match="both panels"):
        picture(results_of(point(2, 1024, 0.5)))


def test_the_table_has_every_point() -> None:
    assert table(SOME).splitlines()[2:] == [
        "| 4 | 8K | 1.33 | 3,000.0 | 75.0 % | 1,000.0 | 3.00 |",
        "| 1 | 8K | 2.00 | 500.0 | 50.0 % | 125.0 | 4.00 |",
        "| 1 | 32K | 1.67 | 600.0 | 60.0 % | | |",
        "| 1 | 1K | 2.50 | 400.0 | 40.0 % | | |",
        "| 2 | 1K..8K | 1.11 | 1,800.0 | 90.0 % | 1.0 | 1800.00 |",
    ]


def test_the_command_writes_the_picture_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(SOME))
    main([str(tmp_path / "results.json"), str(tmp_path / "share.svg")])
    assert (tmp_path / "share.svg").read_text() == picture(SOME)
    assert capsys.readouterr().out == table(SOME)


def headlines(results: Mapping[str, Any]) -> Iterator[str]:
    """What the README's first lines say of 1 and of 16 rows at 8K."""
    for point in results["points"]:
        if point["context"] == 8192 and point["rows"] in (1, 16):
            yield f" {int(point['tokens_per_s']):,}"
            yield f" {point['tokens_per_s'] / point['vllm_tokens_per_s']:.2f} times"


def out_of_date(results: Mapping[str, Any], readme: str, image: str) -> list[str]:
    """What of the README's speed is not what the results say."""
    held = {"the table": table(results) in readme, "the picture": picture(results) == image}
    held["the commit"] = f"commit {results['commit'][:7]}" in readme
    first = " ".join(readme.split("\n## ")[0].split())
    held["the first lines"] = all(figure in first for figure in headlines(results))
    return [what for what, holds in held.items() if not holds]


def test_the_readme_shows_the_results_that_are_kept() -> None:
    readme, image = ROOT / "README.md", ROOT / "docs" / "images" / "decode-share.svg"
    assert not out_of_date(read(RESULTS), readme.read_text(), image.read_text()), REDRAW


def test_other_figures_than_those_kept_are_seen() -> None:
    readme = f"One row gets 500 tokens/s,\n4.00 times theirs.\n## Speed\n{table(SOME)}commit 0123456"
    image = picture(SOME)
    assert not out_of_date(SOME, readme, image)
    [first, one, *rest] = SOME["points"]
    changed = SOME | {"commit": "abcdef0", "points": [first, one | {"tokens_per_s": 600.1}, *rest]}
    assert out_of_date(changed, readme, image) == [
        "the table",
        "the picture",
        "the commit",
        "the first lines",
    ]
