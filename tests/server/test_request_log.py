"""One line for each request: of those that succeed, fail, are refused, and those whose client leaves."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from headrace.server import disconnect
from headrace.server.request_log import line
from tests.server import patient
from tests.server.scripted import REPLY, TURN_TOKENS, Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_disconnect import post_and_keep
from tests.waiting import WAIT, comes

LOGGER = "headrace.server.request_log"
OPERATIONS = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"


class Lines:
    """What has been logged about requests."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def all(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name == LOGGER]

    def of(self, request_id: str | None = None) -> dict[str, Any]:
        """The fields of the one line about a request, which may come a moment after its answer."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            told = (vars(record)["fields"] for record in self.all())
            found[:] = [each for each in told if request_id in (None, each["id"])]
            return bool(found)

        assert comes(there), f"no line about {request_id}: {self._caplog.text}"
        [fields] = found
        return fields


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, http: httpx.Client) -> Iterator[Lines]:
    http.get("/health")  # when this is answered, what was asked before has had its lines
    with caplog.at_level(logging.INFO, logger="headrace"):
        yield Lines(caplog)


def post(http: httpx.Client, request_id: str, path: str = PATH, **body: object) -> httpx.Response:
    return http.post(path, json=body, headers={"X-Request-Id": request_id})


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(http: httpx.Client, server: Scripted, lines: Lines, stream: bool) -> None:
    begun = time.monotonic()
    response = post(http, "mine-1", messages=user("hi"), stream=stream)
    assert response.headers["x-request-id"] == "mine-1"
    fields = lines.of("mine-1")
    spent = 1000 * (time.monotonic() - begun)
    documented = re.search(rf"INFO {LOGGER}: (?:.+\n)+", OPERATIONS.read_text())
    assert documented is not None
    assert list(fields) == re.findall(r"(\w+)=", documented[0])
    request = server.engine.submitted[-1]
    completion = len(REPLY) + TURN_TOKENS  # the synthetic tokenizer has a token a character
    if not stream:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == fields["completion_tokens"]
        assert usage["prompt_tokens"] == fields["prompt_tokens"]
    times = [fields.pop(name) for name in ("queue_ms", "ttft_ms", "total_ms")]
    assert 0 <= times[0] < times[1] < times[2] < spent
    assert fields == {
        "id": "mine-1",
        "method": "POST",
        "path": PATH,
        "status": 200,
        "stream": stream,
        "request": request.id,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": 0,
        "completion_tokens": completion,
        "finish": "stop",
        "cancelled": False,
    }


def test_every_protocol_has_a_line(http: httpx.Client, lines: Lines) -> None:
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 3},
        "/v1/messages": {"messages": user("hi"), "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    }
    for path, body in bodies.items():
        assert post(http, path[4:], path, **body).status_code == 200
        fields = lines.of(path[4:])
        assert (fields["path"], fields["finish"], fields["completion_tokens"]) == (path, "length", 3)
    assert post(http, "no-model", "/tokenize", prompt="hi").status_code == 200
    assert "prompt_tokens" not in lines.of("no-model")


def test_several_answers(http: httpx.Client, lines: Lines) -> None:
    prompts = {"prompt": ["hi", "say {abc}"], "n": 2, "max_tokens": 5}
    usage = post(http, "several", "/v1/completions", **prompts).json()["usage"]
    fields = lines.of("several")
    assert fields["prompt_tokens"] == usage["prompt_tokens"]
    assert fields["completion_tokens"] == usage["completion_tokens"] == 2 * 5 + 2 * 4
    assert fields["finish"] == "length,stop"


def test_an_answer_that_a_stop_string_ended(http: httpx.Client, lines: Lines) -> None:
    body = post(http, "stopped", messages=user("say {one two three}"), stop=["two"]).json()
    fields = lines.of("stopped")
    assert (fields["finish"], fields["cancelled"]) == ("stop", False)
    assert fields["completion_tokens"] == body["usage"]["completion_tokens"]


def test_a_tool_call(http: httpx.Client, server: Scripted, lines: Lines) -> None:
    server.says(
        '<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "ls", "parameters": {}}]'
        "<|END_ACTION|>"
    )
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    post(http, "tool", messages=user("hi"), tools=[tool])
    assert lines.of("tool")["finish"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(server: Scripted, lines: Lines, stream: bool) -> None:
    seen = len(server.engine.submitted)
    connection = post_and_keep(server, stream=stream)
    server.wait_tokens(seen)
    if stream:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    fields = lines.of()
    assert fields["cancelled"] is True
    assert fields["finish"] is None
    assert fields["status"] == (200 if stream else 499)
    assert fields["ttft_ms"] is not None
    assert "error" not in fields


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Scripted, lines: Lines) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT) as connection:
        connection.sendall(b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n{")
    fields = lines.of()
    assert (fields["status"], fields["cancelled"]) == (499, True)
    assert "error" not in fields


def test_without_its_cause_a_cancellation_would_not_be_told(
    server: Scripted, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disconnect, "note_gone", lambda: None)
    connection = post_and_keep(server, stream=True)
    server.wait_busy(running=1)
    connection.close()
    assert lines.of()["cancelled"] is False


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (PATH, {"messages": user("hi"), "temperature": "hot"}, 400, "bad_request"),
        (PATH, {"messages": user("x" * 5000)}, 400, "context_length_exceeded"),
        (PATH, {"messages": user("hi"), "model": "other"}, 404, "model_not_found"),
        ("/v1/messages", {"messages": user("x" * 5000), "max_tokens": 5}, 400, "context_length_exceeded"),
        ("/nowhere", {}, 404, "unknown_path"),
        ("/v1/models", {}, 405, "wrong_method"),
    ],
)
def test_refusals(
    http: httpx.Client, lines: Lines, path: str, body: dict[str, object], status: int, error: str
) -> None:
    assert post(http, "refused", path, **body).status_code == status
    fields = lines.of("refused")
    assert (fields["status"], fields["error"], fields["path"]) == (status, error, path)
    assert "completion_tokens" not in fields
    assert [record.levelname for record in lines.all()] == ["INFO"]


def test_what_the_gate_refuses(lines: Lines) -> None:
    with scripted_server(served={"api_keys": ("key",), "max_body": 100}) as server:
        with patient.client(server.url) as http:
            assert post(http, "no-key", messages=user("hi")).status_code == 401
            headers = {"Authorization": "Bearer key", "X-Request-Id": "large"}
            assert http.post(PATH, content=b"x" * 200, headers=headers).status_code == 413
        assert lines.of("no-key")["error"] == "invalid_api_key"
        assert lines.of("large")["error"] == "body_too_large"


def test_a_full_queue(lines: Lines) -> None:
    with scripted_server(max_sequences=1, queue=1) as server:
        kept = [post_and_keep(server)]
        server.wait_busy(running=1)
        kept.append(post_and_keep(server))
        server.wait_busy(running=1, waiting=1)
        with patient.client(server.url) as http:
            assert post(http, "late", messages=user("hi")).status_code == 429
        assert lines.of("late")["error"] == "queue_full"
        for connection in kept:
            connection.close()
        server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_a_warning(lines: Lines, stream: bool) -> None:
    with scripted_server() as server, patient.client(server.url) as http:
        post(http, "crash", messages=user("crash"), stream=stream)
        fields = lines.of("crash")
        assert (fields["error"], fields["finish"]) == ("engine_error", None)
        assert [record.levelname for record in lines.all()] == ["WARNING"]


def test_looking_is_not_logged_unless_it_fails(http: httpx.Client, lines: Lines) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert http.get(path).status_code == 200
    assert http.get("/nowhere", headers={"X-Request-Id": "lost"}).status_code == 404
    assert lines.of("lost")["status"] == 404
    assert len(lines.all()) == 1


def test_ids_are_made_for_those_who_send_none_or_a_strange_one(http: httpx.Client, lines: Lines) -> None:
    first = http.post("/tokenize", json={"prompt": "x"}).headers["x-request-id"]
    second = http.post("/tokenize", json={"prompt": "x"}, headers={"X-Request-Id": "a b"})
    assert first.startswith("req_")
    assert second.headers["x-request-id"].startswith("req_")
    assert first != second.headers["x-request-id"]
    assert lines.of(first)["path"] == "/tokenize"


def test_cached_tokens_of_a_second_turn(lines: Lines) -> None:
    with scripted_server(prefix_cache=True) as server, patient.client(server.url) as http:
        turns = user("a long beginning " * 20)
        first = post(http, "first", messages=turns).json()
        turns += [first["choices"][0]["message"], *user("and then?")]
        second = post(http, "second", messages=turns).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached > first["usage"]["prompt_tokens"] // 2
        assert cached % 64 == 0
        assert lines.of("first")["cached_tokens"] == 0
        assert lines.of("second")["cached_tokens"] == cached
        reply = post(http, "claude", "/v1/messages", messages=turns, max_tokens=5)
        assert reply.json()["usage"]["cache_read_input_tokens"] == lines.of("claude")["cached_tokens"] > 0
        with_usage = {"include_usage": True}
        reply = post(http, "streamed", messages=turns, stream=True, stream_options=with_usage)
        streamed = reply.text.split("data: ")[-2]
        told = json.loads(streamed)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert told == lines.of("streamed")["cached_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_in_the_other_openai_protocols(lines: Lines, stream: bool) -> None:
    words = "a long beginning " * 20
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": words, "stream_options": {"include_usage": True}},
        "/v1/responses": {"input": words},
    }
    with scripted_server(prefix_cache=True) as server, patient.client(server.url) as http:
        for path, body in bodies.items():
            told = [
                cached_tokens(post(http, f"{path[4:]}-{turn}", path, **body, stream=stream))
                for turn in range(2)
            ]
            assert told[0] == lines.of(f"{path[4:]}-0")["cached_tokens"] == 0
            assert told[1] == lines.of(f"{path[4:]}-1")["cached_tokens"] > len(words) // 2


def cached_tokens(response: httpx.Response) -> int:
    """What the whole answer, or the last event that holds anything, tells of the prefix cache."""
    if response.headers["content-type"].startswith("text/event-stream"):
        data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        told = json.loads(data[-1])
        told = told.get("response", told)
    else:
        told = response.json()
    details = {"prompt_tokens_details", "input_tokens_details"} & told["usage"].keys()
    return int(told["usage"][details.pop()]["cached_tokens"])


def test_a_line_is_one_line_whatever_a_client_sends() -> None:
    fields = {"path": "/x\nid=1 status=200", "finish": None, "total_ms": 12.345, "stream": True, "n": 3}
    assert line(fields) == r'path="/x\nid=1 status=200" finish=- total_ms=12.3 stream=true n=3'
