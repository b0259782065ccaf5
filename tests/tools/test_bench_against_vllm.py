"""Both sides of a comparison in one file, with a script in vLLM's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.points import parse_point
from tests.bench.test_compare import OURS, RUN, saved
from tools.bench_against_vllm import join, main, report, run_vllm, vllm_command


def test_the_command_gets_the_points_that_vllm_can_measure(tmp_path: Path) -> None:
    points = [parse_point(name) for name in ("1x8K", "2x8K", "8x1K..64K", "1x256K")]
    command = vllm_command("bench --decode {decode} --out={out} 'a b'", points, tmp_path, longest=131072)
    assert command == ["bench", "--decode", "1:8192,2:8192", f"--out={tmp_path}", "a b"]


def test_its_environment_and_its_failures(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(int(os.environ['CODE']))"
    assert run_vllm([sys.executable, "-c", program], ["CODE=0"], timeout=60) == ""
    assert "ended with 3" in run_vllm([sys.executable, "-c", program], ["CODE=3"], timeout=60)
    assert "no-such-program" in run_vllm([str(tmp_path / "no-such-program")], [], timeout=60)
    assert "timed out" in run_vllm([sys.executable, "-c", "import time; time.sleep(60)"], [], timeout=0.3)


def test_results_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [point | {"vllm_tokens_per_s": None} for point in OURS["points"]]
    ours, theirs = (
        saved(tmp_path, OURS | {"points": points}, "ours.json"),
        saved(tmp_path, RUN, "theirs.json"),
    )
    join(ours, tmp_path / "there-is-none.json", "the command")
    assert json.loads(ours.read_text())["points"] == points
    join(ours, theirs, "the command")
    joined = json.loads(ours.read_text())
    assert joined["command"] == "the command"
    assert joined["versions"] == {"vllm": "0.24.0"}
    assert [point["vllm_tokens_per_s"] for point in joined["points"]] == [200.0, None]
    assert report(ours, "") == 0
    assert "ratio 2.50" in capsys.readouterr().out
    assert report(ours, "it failed") == 1


def test_vllm_is_not_run_where_ours_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["--json", str(tmp_path / "both.json"), "--vllm", "bench"]) == 2
    assert len(ran) == 1


def test_both_sides_are_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "headrace.cli" in command:
            ran.append(" ".join(command[command.index("bench") :]))
            saved(tmp_path, OURS, "both.json")
        else:
            ran.append("vllm " + command[1])
            Path(command[2]).write_text(json.dumps(RUN))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "both.json"
    arguments = [
        "--json",
        str(path),
        "--vllm",
        "bench {decode} {out}",
        "--point",
        "1x8K",
        "--ours=--launches 5",
    ]
    assert main(arguments) == 0
    assert ran == [f"bench decode --json {path} --point 1x8K --launches 5", "vllm 1:8192"]
    assert json.loads(path.read_text())["points"][0]["vllm_tokens_per_s"] == 200.0
