"""Structured output from a trained model, from the request to its sampler's masks and back.

Schemas leave few tokens to say, so that a model which has never seen one gets done within `max_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.load import load
from tests.server import patient
from tests.server.north import joined
from tests.server.scripted import serving
from tests.server.test_chat import PATH, events, user

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["python", "rust"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
        "done": {"type": "boolean"},
    },
    "required": ["language", "lines", "done"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "report", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    loaded = load("north-micro", device="cpu", dtype="float32")
    options = EngineOptions(max_context=1024, max_sequences=1, decode="torch")
    engine = AsyncEngine(build_engine(loaded.model, loaded.tokenizer, options))
    engine.start()
    try:
        with serving(loaded, engine) as url, patient.client(url) as client:
            yield client
    finally:
        engine.close()


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The plain answer, as a message; the streamed one must be the same."""
    body = {
        "messages": user("Report."),
        "reasoning_effort": "none",
        "max_tokens": 200,
        "temperature": 0,
        **fields,
    }
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    streamed = joined(events(http.post(PATH, json=body | {"stream": True})))
    assert (choice["message"]["content"] or "") == streamed["content"]
    calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
    assert calls == [{"name": each["name"], "arguments": each["arguments"]} for each in streamed["calls"]]
    assert choice["finish_reason"] == streamed["finish_reason"]
    return streamed


def is_report(written: str) -> bool:
    value = json.loads(written)
    return (
        set(value) == {"language", "lines", "done"}
        and value["language"] in ("python", "rust")
        and isinstance(value["lines"], int)
        and 0 <= value["lines"] <= 99
        and isinstance(value["done"], bool)
    )


def test_words_of_a_schema(http: httpx.Client) -> None:
    answer = ask(http, response_format=FORMAT)
    assert is_report(answer["content"])
    assert answer["finish_reason"] == "stop"


def test_a_required_tool(http: httpx.Client) -> None:
    answer = ask(http, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [called] = answer["calls"]
    assert called["name"] == "report"
    assert is_report(called["arguments"])
    assert (answer["content"], answer["finish_reason"]) == ("", "tool_calls")


def test_left_to_itself_the_model_does_neither(http: httpx.Client) -> None:
    """What the tests above see is the masks' doing."""
    answer = ask(http, max_tokens=24)
    assert answer["calls"] == []
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(answer["content"])
