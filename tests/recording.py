"""A plugin of pytest: the figures that tests for a GPU come to, kept in a results file.

A test says `record_check(name, figure, bound)`, which fails it if the figure is above the bound. Of a test
that says nothing, its failures are the figure, 0 or 1, and none may be. The file is written when the session
ends, if --checks FILE is given and a test for a GPU ran.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from headrace.bench.results import origin, write
from headrace.kernel.check.verdict import Check

RecordCheck = Callable[[str, float, float], None]


class Recorder:
    """What the session's tests came to, by test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checks: dict[str, list[Check]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if "gpu" in item.keywords and not report.skipped and (report.when == "call" or report.failed):
            own = self.checks.setdefault(item.nodeid, [])
            if report.failed and all(check.passed for check in own):
                own.append(Check(_words(item), 1, 0))
            elif not own:
                own.append(Check(_words(item), 0, 0))
        return report

    def pytest_sessionfinish(self) -> None:
        if self.checks:
            checks = [check.as_json() for own in self.checks.values() for check in own]
            write(self.path, origin() | {"checks": checks})


def _words(item: pytest.Item) -> str:
    name, _, parameters = item.name.partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameters.rstrip(']')})" if parameters else words


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checks", type=Path, help="where the figures of tests for a GPU go, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--checks")) is not None:
        config.pluginmanager.register(Recorder(path), "recorder")


@pytest.fixture
def record_check(request: pytest.FixtureRequest) -> RecordCheck:
    """Keep a figure of this test, and fail the test if it is above its bound."""
    recorder = request.config.pluginmanager.get_plugin("recorder")

    def record(name: str, figure: float, bound: float) -> None:
        check = Check(name, figure, bound)
        if recorder is not None:
            recorder.checks.setdefault(request.node.nodeid, []).append(check)
        assert check.passed, str(check)

    return record
