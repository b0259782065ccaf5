"""What all tests share: the switch for tests that need a GPU, and that properties are not held to a time."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A slow machine, or a busy one, refutes nothing. What hangs is ended by pytest.
settings.register_profile("timeless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("timeless")

pytest_plugins = ["pytester", "tests.recording"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a Hopper GPU")


def pytest_configure() -> None:
    os.environ.pop("HEADRACE_API_KEY", None)  # a user's would lock the tests' clients out of their servers


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a Hopper GPU: run with --gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
