"""Servers for the tests, and the two clients that talk to them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from headrace.server.structure import grammars
from tests.server import patient
from tests.server.scripted import Scripted, scripted_server
from tests.waiting import WAIT


@pytest.fixture(autouse=True)
def _patient_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine may take longer over a schema than a server lets it."""
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", WAIT)


@pytest.fixture(scope="session")
def _shared_server() -> Iterator[Scripted]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(_shared_server: Scripted) -> Iterator[Scripted]:
    """One server for all tests; every test must leave it idle, with nothing leaked."""
    yield _shared_server
    _shared_server.wait_idle()


@pytest.fixture(scope="session")
def _http(_shared_server: Scripted) -> Iterator[httpx.Client]:
    with patient.client(_shared_server.url) as client:
        yield client


@pytest.fixture(scope="session")
def _sdk(_shared_server: Scripted) -> Iterator[openai.OpenAI]:
    with patient.sdk(_shared_server.url) as client:
        yield client


@pytest.fixture
def http(server: Scripted, _http: httpx.Client) -> httpx.Client:
    return _http


@pytest.fixture
def sdk(server: Scripted, _sdk: openai.OpenAI) -> openai.OpenAI:
    return _sdk
