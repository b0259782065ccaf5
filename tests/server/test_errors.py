"""Every failure is an OpenAI error object, whoever raised it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from headrace.engine.request import EngineError
from headrace.server import conversation
from headrace.server.errors import from_exception
from tests.server import patient
from tests.server.scripted import VOCABULARY, scripted_server
from tests.server.test_chat import PATH, TOOL, events, user
from tests.waiting import WAIT


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error, dict)
    return error


def test_unknown_path_and_method(http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    assert "GET" in error_of(http.get(PATH), 405)["message"]


@pytest.mark.parametrize("content", ['{"messages": [', "hello", "", "[]", '"text"', "null"])
def test_bodies_that_are_no_objects(http: httpx.Client, content: str) -> None:
    response = http.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert "JSON" in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"messages": "\xff"}', "can't decode byte 0xff"),
        (b"[" * 100_000, "recursion depth"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "limit (4300 digits)"),
    ],
)
def test_bodies_that_no_parser_takes(http: httpx.Client, content: bytes, message: str) -> None:
    response = http.post(PATH, content=content, headers={"Content-Type": "application/json"})
    told = error_of(response, 400)["message"]
    assert told.startswith("The body cannot be read as JSON: ")
    assert message in told


def test_other_content_types(http: httpx.Client) -> None:
    response = http.post(PATH, data={"messages": "x"})
    assert "Content-Type: application/json" in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [*user("a"), {"role": "robot", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "gone"}}, "tools": [TOOL]},
            "tool_choice",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "messages"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = error_of(http.post(PATH, json={"messages": user("hi")} | fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_numbers_that_json_does_not_have(http: httpx.Client) -> None:
    body = json.dumps({"messages": user("hi"), "temperature": float("nan")})
    response = http.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["param"] == "temperature"


@pytest.mark.parametrize("content", ["\ud800", [{"type": "text", "text": "\ud800"}]])
def test_half_a_surrogate_pair_is_no_text(http: httpx.Client, content: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content}]})
    response = http.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert "not valid Unicode" in error_of(response, 400)["message"]


def test_a_name_that_cannot_be_encoded_is_repeated_all_the_same(http: httpx.Client) -> None:
    body = json.dumps({"messages": user("hi"), "logit_bias": {"\ud800": "x"}})
    response = http.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["param"].startswith("logit_bias")


def test_another_model(http: httpx.Client, sdk: openai.OpenAI) -> None:
    for path, fields in ((PATH, {"messages": user("hi")}), ("/v1/completions", {"prompt": "x"})):
        error = error_of(http.post(path, json={"model": "gpt-4o", **fields}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    with pytest.raises(
        openai.NotFoundError, match="'gpt-4o' does not exist here; this server has 'scripted'"
    ):
        sdk.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])


def test_our_own_mistakes_are_500_without_their_details(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(conversation, "render", broken)
    error = error_of(http.post(PATH, json={"messages": user("hi")}), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


def test_our_own_mistakes_have_the_headers_of_other_answers_and_leave_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conversation, "render", lambda *_: 1 // 0)
    page = {"Origin": "http://localhost:3000"}
    with scripted_server(served={"cors_origins": ["http://localhost:3000"]}) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT, headers=page) as http:
            responses = [http.post(PATH, json={"messages": user("hi")}) for _ in range(3)]
        for response in responses:
            error_of(response, 500)
            assert response.headers["access-control-allow-origin"] == page["Origin"]
            assert f"request {response.headers['x-request-id']} failed" in caplog.text
        assert "ZeroDivisionError" in caplog.text


def test_an_engine_that_dies_ends_streams_and_answers_with_an_error() -> None:
    with scripted_server() as server, patient.client(server.url) as http:
        body = {"messages": user("crash"), "stream": True}
        with http.stream("POST", PATH, json={"messages": user("endless"), "stream": True}) as bystander:
            server.wait_busy(running=1)
            last = events(http.post(PATH, json=body))[-1]
            assert last["error"]["code"] == "engine_error"
            bystander.read()
            assert "error" in events(bystander)[-1]
        assert error_of(http.get("/health"), 503)["code"] == "engine_unavailable"
        assert error_of(http.post(PATH, json={"messages": user("hi")}), 503)["type"] == "server_error"


def test_a_refusal_of_the_engine_that_is_not_known_yet_is_503() -> None:
    assert from_exception(EngineError("not now")).status == 503
