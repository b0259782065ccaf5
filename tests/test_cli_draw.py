"""`headrace plan draw`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from headrace.cli import app

runner = CliRunner()
MICRO = ["--synthetic", "north-micro-shape", "--sms", "4"]


def test_a_picture_and_a_trace(tmp_path: Path) -> None:
    image, trace = tmp_path / "step.svg", tmp_path / "step.json"
    files = ["--image", str(image), "--trace", str(trace)]
    result = runner.invoke(app, ["plan", "draw", *MICRO, "--rows", "2", "--context", "500", *files])
    assert result.exit_code == 0
    assert result.output.startswith("Predicted ")
    words = "".join(ElementTree.parse(image).getroot().itertext())
    assert "One decode step of north-micro-shape: 2 rows, 500 tokens of context, 4 SMs" in words
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "9000"], "--context 9000 is not from 1 to 8192"),
        (["--context", "500", "--layer", "9"], "there is no layer 9: the model has 0 to 8"),
        (["--image", "nowhere/step.svg"], "nowhere for step.svg: make it first"),
        (["--trace", "nowhere/step.json"], "nowhere for step.json: make it first"),
    ],
)
def test_what_cannot_be_drawn(options: list[str], message: str) -> None:
    result = runner.invoke(app, ["plan", "draw", *MICRO, *options])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
