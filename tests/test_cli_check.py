"""`headrace check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli import app
from headrace.kernel.check.suite import Planned

runner = CliRunner()


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("headrace.kernel.check.suite.Suite.compile", lambda suite, tell: None)


def planned(monkeypatch: pytest.MonkeyPatch, *figures: float) -> None:
    made = [Planned(f"check {n}", 1.0, lambda figure=figure: figure) for n, figure in enumerate(figures)]  # type: ignore[misc]
    monkeypatch.setattr("headrace.kernel.check.suite.Suite.checks", lambda suite: made)


@pytest.mark.usefixtures("_hopper")
def test_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned(monkeypatch, 0.25, 1.0)
    path = tmp_path / "check.json"
    result = runner.invoke(app, ["check", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "ok      check 0: 0.25, at most 1" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("All 2 checks passed")
    written = json.loads(path.read_text())
    assert list(written) == ["date", "machine", "commit", "command", "versions", "checks"]
    assert written["checks"][0] == {"name": "check 0", "passed": True, "figure": 0.25, "bound": 1.0}


@pytest.mark.usefixtures("_hopper")
def test_something_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned(monkeypatch, 0.25, 1.5)
    path = tmp_path / "check.json"
    result = runner.invoke(app, ["check", "--json", str(path)])
    assert result.exit_code == 1
    assert "FAILED  check 1: 1.5, at most 1" in result.stdout
    assert "1 of 2 checks failed" in result.stdout
    assert [check["passed"] for check in json.loads(path.read_text())["checks"]] == [True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    result = runner.invoke(app, ["check"])
    assert result.exit_code == 2
    assert "needs a Hopper GPU" in result.output
