"""The server's end: answers under way get some time, and those whom it is too short for are told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headrace.server import app, streaming
from tests.server import patient
from tests.server.replies import events_of
from tests.server.scripted import scripted_server
from tests.server.test_chat import PATH, events, user
from tests.server.test_disconnect import COMPLETIONS, ENDLESS, MESSAGES, PATHS, RESPONSES
from tests.server.test_errors import error_of

NOT_ON = "The server is shutting down and cannot answer to the end."


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SHUTDOWN_SECONDS", 0.2)


@contextmanager
def at_the_end(path: str, **fields: Any) -> Iterator[httpx.Response]:
    """What a request gets whose answer has no end, when the server ends."""
    with ThreadPoolExecutor(1) as pool:
        with scripted_server() as server:
            response = pool.submit(patient.post, server.url + path, json=ENDLESS[path] | fields)
            server.wait_busy(running=1)
        yield response.result()


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_has_not_begun_is_503(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with at_the_end(path) as response:
        if path == MESSAGES:
            assert response.status_code == 503
            assert response.json()["error"] == {"type": "overloaded_error", "message": NOT_ON}
        else:
            error = error_of(response, 503)
            assert (error["message"], error["code"]) == (NOT_ON, "shutdown")
        assert response.headers["x-request-id"].startswith("req_")
    told(caplog)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_ends_with_an_error_in_its_protocols_words(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with at_the_end(path, stream=True) as response:
        assert response.status_code == 200
        if path in (PATH, COMPLETIONS):
            last = events(response)[-1]  # which sees that [DONE] comes after it
            assert last["error"]["message"] == NOT_ON
        else:
            last = events_of(response)[-1]
            assert NOT_ON in str(last)
            assert last["type"] == {MESSAGES: "error", RESPONSES: "response.failed"}[path]
    told(caplog)


def test_an_answer_that_ends_in_time_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SHUTDOWN_SECONDS", 100)
    body = {"messages": user("endless"), "max_tokens": 100, "stream": True}
    with at_the_end(PATH, **body) as response:
        assert events(response)[-1]["choices"][0]["finish_reason"] == "length"


def test_the_gate_is_red_without_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> None: ...

    monkeypatch.setattr(streaming.EventStream, "_cut_off", silent)
    with pytest.raises(httpx.RemoteProtocolError), at_the_end(PATH, stream=True):
        pass


def told(caplog: pytest.LogCaptureFixture) -> None:
    """A line for the request, and no traceback."""
    [line] = [each for each in caplog.records if each.name == "headrace.server.request_log"]
    assert "error=shutdown" in line.getMessage()
    assert line.levelno == logging.WARNING
    assert not [each for each in caplog.records if each.exc_info]
