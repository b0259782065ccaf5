"""`headrace plan`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.step.checker import Check, Fault

runner = CliRunner()
MICRO = ("--synthetic", "north-micro-shape", "--sms", "4")


def test_a_sound_plan() -> None:
    result = runner.invoke(app, ["plan", "check", *MICRO, "--rows", "2"])
    assert result.exit_code == 0, result.output
    assert "up to 2 rows, 4 SMs, 9 layers" in result.output
    assert "sound; built in" in result.output


def test_faults_are_listed_and_set_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault(Check.CYCLE, "waits for [up]", layer=3), Fault(Check.BUDGET, "too much")]
    monkeypatch.setattr("headrace.step.checker.check", lambda plan: faults)
    result = runner.invoke(app, ["plan", "check", *MICRO])
    assert result.exit_code == 1
    assert "cycle: layer 3: waits for [up]\nbudget: too much\n2 faults; built in" in result.output


def test_figures_and_lists() -> None:
    figures = runner.invoke(app, ["plan", "show", *MICRO])
    assert "Descriptors" in figures.output
    everything = runner.invoke(app, ["plan", "show", *MICRO, "--sm", "3"]).output.splitlines()
    assert "EMBED" in everything[0]
    assert "SAMPLE_COMMIT" in everything[-1]
    one = runner.invoke(app, ["plan", "show", *MICRO, "--sm", "3", "--layer", "2"]).output.splitlines()
    assert one == [line for line in everything if " layer=2 " in line]
    assert one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "give either a MODEL or --synthetic with one of: north-mini-code"),
        (["check", "--synthetic", "none"], "there is no shape called 'none'"),
        (["check", *MICRO, "--rows", "3"], "rows is 3: a plan is for one of 1, 2, 4, 8, 16 rows"),
        (["show", *MICRO, "--sm", "4"], "there is no SM 4: the plan has SMs 0 to 3"),
        (["show", *MICRO, "--layer", "9"], "there is no layer 9: the model has 0 to 8"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
