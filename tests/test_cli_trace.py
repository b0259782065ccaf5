"""`headrace trace`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headrace.bench.points import Point
from headrace.bench.traced import Traced
from headrace.cli import app
from headrace.kernel.build import BuildError
from headrace.kernel.device import DeviceError
from headrace.kernel.launcher import WatchdogError
from headrace.kernel.trace import TraceError
from headrace.kernel.variant import VariantError
from headrace.model.config import ModelConfig
from headrace.step.isa import Opcode
from tests.kernel.test_trace import whole

runner = CliRunner()


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(config: ModelConfig, point: Point, **_: Any) -> Traced:
        return Traced(whole(3), {Opcode.O_PROJ: 4.5e6}, recording=2.05, plain=2.0)

    monkeypatch.setattr("headrace.bench.traced.trace_decode", record)


@pytest.mark.usefixtures("_recorded")
def test_a_summary_and_a_file(tmp_path: Path) -> None:
    path, image = tmp_path / "trace.json", tmp_path / "trace.svg"
    command = ["trace", str(path), "--shown", "2", "--sms", "1", "--image", str(image), "--layer", "2"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "3 steps recorded" in result.stdout
    assert "EXPERT_UP" in result.stdout
    assert re.search(r"O_PROJ .* 4\.5 +\d+\.\d\d$", result.stdout, re.MULTILINE)
    assert "2.050 ms a step, 2.000 without recording (+2.5%)" in result.stdout
    picture = image.read_text()
    assert picture.startswith("<svg")
    assert "One decode step of north-mini-code: 1x8K" in picture
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0}
    assert {event["args"]["step"] for event in events if "step" in event.get("args", {})} == {1, 2}


@pytest.mark.parametrize("error", [BuildError, DeviceError, TraceError, VariantError, WatchdogError])
def test_what_the_kernel_refuses_is_said_in_one_sentence(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Traced:
        raise error("it cannot be")

    monkeypatch.setattr("headrace.bench.traced.trace_decode", fail)
    result = runner.invoke(app, ["trace"])
    assert result.exit_code == 2
    assert "it cannot be" in result.output


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("arguments", [["nowhere/file"], ["--image", "nowhere/file"]])
def test_a_place_that_is_none_is_refused_before_the_launch(arguments: list[str]) -> None:
    result = runner.invoke(app, ["trace", *arguments])
    assert result.exit_code == 2
    assert "nowhere for file: make it first" in result.output
    assert "recorded" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    result = runner.invoke(app, ["trace"])
    assert result.exit_code == 2
    assert "needs a Hopper GPU" in result.output
