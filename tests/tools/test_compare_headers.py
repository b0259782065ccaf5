"""Kernels with other headers side by side, where nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.decode import BenchError
from headrace.bench.points import Point
from headrace.kernel.build import INCLUDE, fixed_headers
from headrace.kernel.launcher import WatchdogError
from headrace.kernel.variant import variant_of
from headrace.model.presets import PRESETS
from headrace.step.planner import build_plan
from tests.tools.test_compare_trees import cells
from tools import compare_headers
from tools.compare_headers import main, parse_kernels

TIMES = {"base": [2.0, 2.5, 2.0], "fast": [1.8, 2.0, 1.7], "wrong": [1.0, 1.0, 1.0]}


class Fake:
    """Its kernels take as long as TIMES says; `wrong` fails at its second measurement."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.kernels: Mapping[str, Mapping[str, str]] = {}

    @contextmanager
    def on_gpu(
        self, synthetic: str, kernels: Mapping[str, Mapping[str, str]], points: Sequence[Point], launches: int
    ) -> Iterator[compare_headers.Measure]:
        self.kernels = kernels
        yield self.measure

    def measure(self, name: str, point: Point) -> Mapping[str, Any]:
        self.measured.append(name)
        number = self.measured.count(name)
        if name == "wrong" and number == 2:
            raise WatchdogError("layer 1 waited for X")
        ms = TIMES[name][number - 1]
        return {"rows": point.rows, "context": point.context, "ms_per_step": ms, "share_of_limit": 1.6 / ms}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(compare_headers, "on_gpu", made.on_gpu)
    return made


def folder(place: Path, name: str) -> str:
    """A kernel as it is named on the command line, with two headers of its own."""
    (place / name / "ops").mkdir(parents=True)
    (place / name / "pace.h").write_text(f"// {name}")
    (place / name / "ops" / "new.h").write_text("")
    return f"{name}={place / name}"


def test_ratios_are_to_the_kernel_as_it_is(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([folder(tmp_path, "fast"), "--points", "1x8K", "--rounds", "2"]) == 0
    assert fake.measured == ["base", "fast", "fast", "base"]
    assert fake.kernels == {"base": {}, "fast": {"pace.h": "// fast", "ops/new.h": ""}}
    assert cells(capsys.readouterr().out) == {
        ("1x8K", "base"): ["2.000", "2.500", "2.250", "72.0%"],
        ("1x8K", "fast"): ["1.800", "2.000", "1.900", "0.850", "0.800..0.900", "84.4%"],
    }


def test_a_kernel_that_fails_is_left_out(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [folder(tmp_path, "wrong"), folder(tmp_path, "fast")]
    assert main([*folders, "--points", "1x8K", "--rounds", "3"]) == 1
    assert fake.measured == ["base", "wrong", "fast", "fast", "wrong", "base", "base", "fast"]
    printed, told = capsys.readouterr()
    assert told == "round 2, wrong: left out from here on: layer 1 waited for X\n"
    assert cells(printed)["1x8K", "wrong"][:4] == ["1.000", "-", "-", "1.000"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{fast}"], "is not NAME=FOLDER"),
        (["base={fast}"], "base is the kernel as it is"),
        (["a={fast}", "a={fast}"], "two kernels are called a"),
        (["a={empty}"], "a: there is no header in"),
        (["a={fast}", "--points", "17x8K"], "'17x8K': a step has 1 to 16 rows"),
        (["a={fast}", "--rounds", "0"], "--rounds and --launches must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], sentence: str
) -> None:
    folder(tmp_path, "fast")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main([part.format(fast=tmp_path / "fast", empty=tmp_path / "empty") for part in arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not fake.measured


def test_headers_take_the_place_of_the_kernels_own() -> None:
    """And never of those that are generated for the plan."""
    variant = variant_of(build_plan(PRESETS["north-micro-shape"], rows=1, sms=132))
    other = variant.replaced({"pace.h": "// other", "sizes.h": "// other"})
    texts = {**fixed_headers(), **other.headers}
    assert texts["pace.h"] == "// other"
    assert texts["sizes.h"] == variant.headers["sizes.h"]
    assert texts["ring.h"] == (INCLUDE / "ring.h").read_text()


def test_the_whole_folder_as_it_is_changes_nothing() -> None:
    assert parse_kernels([f"same={INCLUDE}"])["same"] == fixed_headers()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([folder(tmp_path, "fast")]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err


def test_errors_of_a_bench_are_a_kernels_failure() -> None:
    def fails(name: str, point: Point) -> Mapping[str, Any]:
        raise BenchError("a row's logits are not finite")

    [run] = compare_headers.compare(["base"], [Point((8192,))], 2, fails)
    assert (run.round, run.tree, run.results, run.failure) == (
        1,
        "base",
        {"points": []},
        "a row's logits are not finite",
    )
