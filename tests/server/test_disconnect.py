"""A client that leaves frees its request within one step: streamed, plain, and while queued."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from headrace.server import disconnect
from tests.server import patient
from tests.server.scripted import Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.waiting import WAIT


@pytest.fixture
def narrow() -> Iterator[Scripted]:
    """A server that runs one sequence at a time, so that a second request has to queue."""
    with scripted_server(max_sequences=1) as server:
        yield server


COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
PATHS = [PATH, COMPLETIONS, MESSAGES, RESPONSES]
ENDLESS: dict[str, dict[str, object]] = {
    PATH: {"messages": user("endless")},
    COMPLETIONS: {"prompt": "endless"},
    MESSAGES: {"messages": user("endless"), "max_tokens": 1000, "model": "scripted"},
    RESPONSES: {"input": "endless"},
}


def post_and_keep(server: Scripted, path: str = PATH, **fields: object) -> socket.socket:
    """Send a request for an endless answer and leave the connection open."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 0), timeout=WAIT)
    body = json.dumps(ENDLESS[path] | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def leave_while_running(server: Scripted, path: str = PATH, *, stream: bool, seconds: float = WAIT) -> None:
    """Leave a running request; AssertionError unless it is gone within one step of the cancellation, or if
    that is not asked for within `seconds`."""
    seen = len(server.engine.submitted)
    connection = post_and_keep(server, path, stream=stream)
    server.wait_tokens(seen)
    if stream:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    server.wait_idle(seconds)
    request = server.engine.submitted[seen]
    steps_after = server.backend.steps - server.engine.cancelled_at[request]
    assert steps_after <= 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_running_request(server: Scripted, path: str, stream: bool) -> None:
    leave_while_running(server, path, stream=stream)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_queued_request(narrow: Scripted, path: str, stream: bool) -> None:
    first = post_and_keep(narrow, stream=True)
    narrow.wait_busy(running=1)
    second = post_and_keep(narrow, path, stream=stream)
    narrow.wait_busy(running=1, waiting=1)
    queued = narrow.engine.submitted[1]
    second.close()
    narrow.wait_none_waiting()
    assert narrow.engine.state.running == 1  # the other request goes on
    assert queued.output == []
    first.close()
    narrow.wait_idle()


def test_all_choices_of_a_request(server: Scripted) -> None:
    connection = post_and_keep(server, n=3)
    server.wait_busy(running=3)
    connection.close()
    server.wait_idle()


@pytest.mark.parametrize("path", [PATH, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [True, False])
def test_gate_is_red_without_the_listener(monkeypatch: pytest.MonkeyPatch, path: str, stream: bool) -> None:
    async def never(receive: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(disconnect, "_gone", never)
    with scripted_server() as server:
        with pytest.raises(AssertionError, match="still busy"):
            leave_while_running(server, path, stream=stream, seconds=1.0)
        server.engine.close()  # nothing else would end the request


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    with scripted_server(max_sequences=1, queue=1) as server:
        first = post_and_keep(server)
        server.wait_busy(running=1)
        second = post_and_keep(server)
        server.wait_busy(running=1, waiting=1)
        for stream in (False, True):
            body = {"messages": user("hi"), "stream": stream}
            response = patient.post(server.url + PATH, json=body)
            assert response.status_code == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
        first.close()
        second.close()
        server.wait_idle()
        assert patient.post(server.url + PATH, json={"messages": user("hi")}).status_code == 200


def test_a_request_of_which_only_a_part_fits_leaves_nothing_behind() -> None:
    with scripted_server(max_sequences=1, queue=2) as server:
        first = post_and_keep(server)
        server.wait_busy(running=1)
        body = {"messages": user("endless"), "n": 3, "max_tokens": 500}
        assert patient.post(server.url + PATH, json=body).status_code == 429
        server.wait_none_waiting()
        first.close()
        server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_what_can_never_fit_is_a_400_and_what_fits_an_idle_server_is_served(stream: bool) -> None:
    with scripted_server(max_sequences=1, queue=2) as server:
        chat = {"messages": user("hi"), "n": 4, "stream": stream}
        batch = {"prompt": ["a", "b"], "n": 2, "stream": stream}
        many = {"prompt": ["a"] * 4, "stream": stream}
        for path, body, param in (
            (PATH, chat, "n"),
            ("/v1/completions", batch, "n"),
            ("/v1/completions", many, "prompt"),
        ):
            response = patient.post(server.url + path, json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, "too_many_answers")
            assert "takes at most 3 at a time" in error["message"]
        for path, body in ((PATH, chat | {"n": 3}), ("/v1/completions", many | {"prompt": ["a"] * 3})):
            for _ in range(5):  # whatever the engine does while they are being submitted
                assert patient.post(server.url + path, json=body).status_code == 200
                server.wait_idle()
