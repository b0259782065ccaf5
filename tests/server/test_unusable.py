"""A model that gives no numbers for one request: that one fails in its protocol's words, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.scripted import Scripted

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)


def body(path: str, words: str, **fields: Any) -> dict[str, Any]:
    user = [{"role": "user", "content": words}]
    given: dict[str, dict[str, Any]] = {
        CHAT: {"messages": user},
        COMPLETIONS: {"prompt": words},
        MESSAGES: {"messages": user, "max_tokens": 100},
        RESPONSES: {"input": words},
    }
    return given[path] | {"model": "scripted"} | fields


def error_of(path: str, event: dict[str, Any]) -> dict[str, Any]:
    """The error object, checked to have its protocol's shape around it."""
    if path == RESPONSES and "response" in event:
        assert event["type"] == "response.failed"
        return dict(event["response"]["error"])
    if path == MESSAGES:
        assert event["type"] == "error"
        assert event["error"]["type"] == "api_error"
    else:
        assert event["error"]["type"] == "server_error"
        assert event["error"]["code"] == "engine_error"
    return dict(event["error"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_it_fails_alone_in_its_protocols_words(http: httpx.Client, server: Scripted, path: str) -> None:
    with http.stream("POST", CHAT, json=body(CHAT, "endless", stream=True)) as other:
        lines = other.iter_lines()
        next(lines)
        plain = http.post(path, json=body(path, "spoilt"))
        assert plain.status_code == 500
        message = error_of(path, plain.json())["message"]
        assert "after 2 tokens" in message
        assert "Send this one again" in message

        streamed = http.post(path, json=body(path, "spoilt", stream=True))
        assert streamed.status_code == 200
        events = [
            json.loads(line.removeprefix("data: "))
            for line in streamed.text.splitlines()
            if line.startswith("data: {")
        ]
        assert len(events) > 1  # what came before
        assert "after 2 tokens" in error_of(path, events[-1])["message"]

        for _ in range(20):  # the other stream goes on
            assert "error" not in next(lines)
        assert server.engine.alive
    assert http.post(path, json=body(path, "hello")).status_code == 200
