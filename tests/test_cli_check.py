"""`headrace check`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli import app
from headrace.kernel.check.layer import Left
from headrace.kernel.check.suite import Planned
from headrace.model.config import ModelConfig

runner = CliRunner()


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
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


def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is packed, and how many layers of it; nothing really is."""
    calls: list[tuple[str, int]] = []

    def checkpoint(path: Path, *, layers: int, **others: object) -> None:
        calls.append((path.name, layers))

    def made(config: ModelConfig, **others: object) -> None:
        calls.append((config.family, config.num_layers))

    monkeypatch.setattr("headrace.step.pack.pack_checkpoint", checkpoint)
    monkeypatch.setattr("headrace.step.pack.pack_synthetic", made)
    left = [
        Left("X", torch.full((16, 4, 8), 1.01), torch.ones(16, 4, 8)),
        Left("QKV", *[torch.ones(4, 8)] * 2),
    ]
    monkeypatch.setattr("headrace.kernel.check.layer.left_by_last_layer", lambda packed, sms: left)
    return calls


@pytest.mark.usefixtures("_hopper")
def test_a_layer_is_shown_buffer_by_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls, path = packed(monkeypatch), tmp_path / "left.npz"
    result = runner.invoke(app, ["check", "north-micro", "--layer", "7", "--buffers", str(path)])
    assert result.exit_code == 0, result.output
    assert calls == [("north-micro", 8)]
    cells = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in result.stdout.splitlines()]
    assert ["X", "16 x 4 x 8", "0.01", "0.01"] in cells
    assert ["QKV", "4 x 8", "0", "0"] in cells
    assert path.exists()
    assert runner.invoke(app, ["check", "--synthetic", "north-mini-code", "--layer", "0"]).exit_code == 0
    assert calls[1:] == [("cohere2_moe", 1)]


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["north-micro", "--layer", "12"], "there is no layer 12: the model has 0 to 11"),
        (["--layer", "1"], "give either a MODEL or --synthetic"),
        (["north-micro"], "go with --layer"),
        (["--buffers", "left.npz"], "go with --layer"),
        (["north-micro", "--layer", "1", "--json", "check.json"], "--json is for the whole check"),
        (["north-micro", "--layer", "1", "--buffers", "nowhere/left.npz"], "nowhere for left.npz"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["check", *arguments])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    result = runner.invoke(app, ["check"])
    assert result.exit_code == 2
    assert "needs a Hopper GPU" in result.output
