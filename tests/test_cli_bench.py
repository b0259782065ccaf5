"""`headrace bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headrace.bench.decode import Measured, Method
from headrace.bench.points import Point
from headrace.bench.power import Power
from headrace.cli import app
from headrace.cli.bench import table_of
from headrace.model.config import ModelConfig
from headrace.step.limit import StepBytes
from tests.bench.test_compare import OURS, RUN, saved

runner = CliRunner()


@pytest.fixture
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point takes 2 ms a step, reads 4 GB, and is at the power limit."""

    def bench(
        config: ModelConfig, points: Sequence[Point], *, bandwidth: float | None, method: Method, **_: Any
    ) -> Iterator[Measured]:
        for point in points:
            yield Measured(
                point=point,
                milliseconds=(2.0, 2.0, 2.25),
                experts=384.0,
                uniform=384.0,
                read=StepBytes(2e9, 1e9, 1e9),
                bandwidth=bandwidth or 4e12,
                power=Power(sm_clock_mhz=1790.0, watts=703.2, limited=True),
            )

    monkeypatch.setattr("headrace.bench.decode.bench_decode", bench)


@pytest.mark.usefixtures("_pretended")
def test_a_table_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = runner.invoke(
        app,
        [
            "bench",
            "decode",
            "--point",
            "1x8K",
            "--point",
            "2x1K..2K",
            "--json",
            str(path),
            "--bandwidth",
            "4",
        ],
        env={"COLUMNS": "150"},
    )
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["1", "8K", "2.000", "0.250", "500.0", "4.000", "384", "384", "50.0%", "1,790", "*703"] in lines
    assert any(line[:2] == ["2", "1K..2K"] for line in lines)
    written = json.loads(path.read_text())
    assert {"date", "machine", "commit", "command", "versions", "points"} <= set(written)
    first, second = written["points"]
    assert first["share_of_limit"] == 0.5
    assert first["vllm_tokens_per_s"] is None
    assert (first["sm_clock_mhz"], first["power_w"], first["power_limited"]) == (1790, 703.2, True)
    assert second["context"] == [1024, 2048]


@pytest.mark.usefixtures("_pretended")
def test_vllms_column(tmp_path: Path) -> None:
    path, theirs = tmp_path / "out.json", saved(tmp_path, RUN, "vllm.json")
    command = ["bench", "decode", "--point", "1x8K", "--json", str(path), "--vllm", str(theirs)]
    result = runner.invoke(app, command, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    assert any(line.split()[-2:] == ["200.0", "2.50"] for line in result.stdout.splitlines())
    assert json.loads(path.read_text())["points"][0]["vllm_tokens_per_s"] == 200.0


def watched(rows: int, power: Power | None) -> Measured:
    read = StepBytes(2e9, 1e9, 1e9)
    return Measured(
        point=Point((8192,) * rows),
        milliseconds=(2.0,),
        experts=1,
        uniform=1,
        read=read,
        bandwidth=4e12,
        power=power,
    )


def printed(*measured: Measured, width: int = 150) -> list[list[str]]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table_of(list(measured), None, "A title"))
    return [line.split() for line in capture.get().splitlines()]


def test_points_at_the_power_limit_are_marked_and_the_mark_explained() -> None:
    fast, slow = Power(1980.0, 643.1, limited=False), Power(1790.0, 703.2, limited=True)
    _, head, *lines = printed(watched(1, fast), watched(2, None), watched(16, slow))
    assert head[-2:] == ["MHz", "W"]
    assert [lines[0][-3:], lines[1][-1:], lines[2][-3:]] == [
        ["50.0%", "1,980", "643"],
        ["50.0%"],
        ["50.0%", "1,790", "*703"],
    ]
    assert lines[3][:5] == ["*", "At", "its", "power", "limit:"]


def test_no_figure_is_cut_off_in_80_columns() -> None:
    power = Power(1790.0, 703.2, limited=True)
    mixture = replace(watched(8, power), point=Point((1024,) * 7 + (65536,)), experts=12_345, uniform=12_345)
    figures = [
        "8",
        "1K..64K",
        "2.000",
        "0.000",
        "4,000.0",
        "4.000",
        "12,345",
        "12,345",
        "50.0%",
        "1,790",
        "*703",
    ]
    assert figures in printed(mixture, width=80)


def test_without_a_mark_nothing_is_explained() -> None:
    _, head, *lines = printed(watched(1, Power(1980.0, 643.1, limited=False)))
    assert head[-2:] == ["MHz", "W"]
    assert len(lines) == 1


def test_without_looks_there_are_no_columns_for_them() -> None:
    _, head, *lines = printed(watched(1, None))
    assert head[-1] == "limit"
    assert len(lines) == 1


def test_files_side_by_side(tmp_path: Path) -> None:
    ours, theirs = saved(tmp_path, OURS, "ours.json"), saved(tmp_path, RUN, "theirs.json")
    result = runner.invoke(app, ["bench", "compare", str(ours), str(theirs)], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["1", "8K", "500.0", "200.0", "2.50"] in lines
    assert ["2", "64..128", "500.0"] in lines
    assert ["4", "8K", "500.0"] in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--point", "8K"], "is not ROWSxCONTEXT"),
        (["decode", "--synthetic", "nothing"], "there is no shape called 'nothing'"),
        (["compare", "no-such-file.json"], "there is no file no-such-file.json"),
        (["decode", "--vllm", "no-such-file.json"], "there is no file no-such-file.json"),
        (["decode", "--bandwidth", "0"], "--bandwidth is 0: give TB/s above 0"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
