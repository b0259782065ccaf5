"""`headrace plan draw`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.step.oracle.world import north

runner = CliRunner()
DOCS = Path(__file__).resolve().parent.parent / "docs"
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


def test_the_documentations_picture_is_that_of_the_plan_as_it_is(tmp_path: Path) -> None:
    """README.md has the command. docs/step.md tells the time and the share below it."""
    image = tmp_path / "step.svg"
    result = runner.invoke(app, ["plan", "draw", "--synthetic", "north-mini-code", "--image", str(image)])
    assert result.exit_code == 0
    assert image.read_bytes() == (DOCS / "images" / "decode-step.svg").read_bytes()
    found = re.search(r"Predicted ([\d.]+) ms .*: ([\d.]+)% of the bandwidth limit", result.output)
    assert found is not None
    said = f"{float(found[1]):.2f} ms or {float(found[2]):.0f} % of the limit"
    assert said in (DOCS / "step.md").read_text()


def test_a_model_of_few_layers_has_its_last_one_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.plan.config_of", lambda model, synthetic: north())
    image = tmp_path / "step.svg"
    result = runner.invoke(app, ["plan", "draw", *MICRO, "--context", "500", "--image", str(image)])
    assert result.exit_code == 0, result.output
    assert "Layer 2 at close range" in "".join(ElementTree.parse(image).getroot().itertext())


def test_a_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    """Said before anything is predicted."""
    for option in ("--image", "--trace"):
        result = runner.invoke(app, ["plan", "draw", *MICRO, option, str(tmp_path)])
        assert result.exit_code == 2
        assert result.output.replace("\n", "") == f"headrace: {tmp_path} is a folder: name a file in it"


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
