"""The figures of tests for a GPU end up in a file, the bad ones as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no kernel")

@pytest.mark.gpu
def test_two_figures(record_check):
    record_check("near", 0.25, 1)
    record_check("nearer", 0.125, 1)

@pytest.mark.gpu
def test_above_its_bound(record_check):
    record_check("far", 2.0, 1)

@pytest.mark.gpu
def test_fails_after_a_figure(record_check):
    record_check("first", 0.5, 1)
    raise RuntimeError("then nothing")

@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4])
def test_no_figure(rows):
    pass

@pytest.mark.gpu
def test_cannot_begin(broken):
    pass

@pytest.mark.gpu
def test_skipped():
    pytest.skip("not here")

def test_needs_no_gpu():
    pass
"""


@pytest.fixture
def session(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU\n")
    return pytester


def run(session: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return session.runpytest_inprocess("-p", "tests.recording", "-p", "no:randomly", *arguments)


def test_every_test_for_a_gpu_leaves_a_check(session: pytest.Pytester) -> None:
    path = session.path / "results" / "checks.json"
    run(session, "--checks", str(path)).assert_outcomes(passed=3, failed=2, errors=1, skipped=1)
    written = json.loads(path.read_text())
    assert list(written) == ["date", "machine", "commit", "command", "versions", "checks"]
    found = {check["name"]: (check["passed"], check["figure"], check["bound"]) for check in written["checks"]}
    assert found == {
        "near": (True, 0.25, 1),
        "nearer": (True, 0.125, 1),
        "far": (False, 2.0, 1),
        "first": (True, 0.5, 1),
        "fails after a figure": (False, 1, 0),
        "no figure (4)": (True, 0, 0),
        "cannot begin": (False, 1, 0),
    }


def test_without_the_option_bounds_hold_all_the_same(session: pytest.Pytester) -> None:
    run(session).assert_outcomes(passed=3, failed=2, errors=1, skipped=1)
    assert not list(Path(session.path).rglob("*.json"))


def test_a_session_without_such_tests_writes_nothing(session: pytest.Pytester) -> None:
    path = session.path / "checks.json"
    run(session, "--checks", str(path), "-k", "needs_no_gpu").assert_outcomes(passed=1, deselected=6)
    assert not path.exists()
