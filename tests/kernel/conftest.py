"""What tests of the kernel share: kernels for the host, each compiled once a session."""

from __future__ import annotations

import os

import pytest

from tests.kernel.emulated.libraries import Libraries


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    base = tmp_path_factory.getbasetemp()
    return Libraries((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated kernels")
