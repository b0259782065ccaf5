"""Anthropic's Messages protocol, as Claude Code speaks it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.server import patient
from tests.server.north import action, call, text, thinks
from tests.server.replies import answer_of, events_of
from tests.server.scripted import CONTEXT, REPLY, Scripted, scripted_server

PATH = "/v1/messages"
READ = call("read", {"path": "a.py"})
LIST = '{"tool_name": "list", "parameters": {}}'
TOOL = {
    "name": "read",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
THINKING: dict[str, Any] = {"thinking": {"type": "adaptive"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    return answer_of(http.post(PATH, json=body(**fields)))


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events_of(http.post(PATH, params={"beta": "true"}, json=body(**fields, stream=True)))


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream amounts to, put together as the protocol says."""
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    open_block: int | None = None
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                block, delta = message["content"][-1], event["delta"]
                kind = delta.pop("type")
                key = {"input_json_delta": "json"}.get(kind, kind.removesuffix("_delta"))
                [value] = delta.values()
                assert value
                block[key] += value
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"] | {"usage": event["usage"]}
            case "message_stop":
                assert event is events[-1]
            case other:
                raise AssertionError(other)
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is random."""
    content = [{k: v for k, v in b.items() if k not in ("id", "signature")} for b in message["content"]]
    return {key: value for key, value in message.items() if key != "id"} | {"content": content}


def test_thoughts_words_and_calls(http: httpx.Client, server: Scripted) -> None:
    line = thinks("I look.", text("First."), action(READ, LIST))
    server.says(line, line)
    message = assembled(stream(http, **THINKING))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, words, read, listing = message["content"]
    assert thinking["thinking"] == "I look."
    assert thinking["signature"]
    assert words["text"] == "First."
    assert (read["name"], read["input"]) == ("read", {"path": "a.py"})
    assert listing["input"] == {}
    assert read["id"].startswith("toolu_")
    assert read["id"] != listing["id"]
    assert (message["stop_reason"], message["role"], message["type"]) == ("tool_use", "assistant", "message")
    assert comparable(post(http, **THINKING)) == comparable(message)


def test_plain_words(http: httpx.Client, server: Scripted) -> None:
    message = post(http)
    assert message["content"] == [{"type": "text", "text": REPLY}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert comparable(assembled(stream(http))) == comparable(message)
    assert message["usage"]["output_tokens"] == len(REPLY) + 3
    assert message["usage"]["input_tokens"] == len(server.engine.submitted[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
    ],
)
def test_thinking_is_off_unless_asked_for(
    http: httpx.Client, server: Scripted, fields: dict[str, Any], on: bool
) -> None:
    post(http, **fields)
    assert server.prompt.endswith("<|START_THINKING|>") == on


def test_a_call_that_the_limit_cuts(http: httpx.Client, server: Scripted) -> None:
    line = "<|START_ACTION|>[" + READ
    limit = len(server.tokenizer.encode(line)) - 4
    server.says(line, line)
    message = post(http, max_tokens=limit)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}
    events = stream(http, max_tokens=limit)
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", [None, {"path": "a."}, '{"path": "a.'])
def test_a_cut_call_can_be_sent_back(http: httpx.Client, server: Scripted, arguments: Any) -> None:
    """As it came (None), or with what a client made of the part of the arguments that was streamed."""
    line = "<|START_ACTION|>[" + READ
    server.says(line)
    message = post(http, max_tokens=len(server.tokenizer.encode(line)) - 4)
    assert message["stop_reason"] == "max_tokens"
    [cut] = message["content"]
    if arguments is not None:
        cut["input"] = arguments
    result = {"type": "tool_result", "tool_use_id": cut["id"], "is_error": True, "content": "Cut off."}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [cut]},
        {"role": "user", "content": [result]},
    ]
    assert post(http, messages=turns)["content"] == [{"type": "text", "text": REPLY}]
    assert '"tool_name": "read"' in server.prompt
    assert "Cut off." in server.prompt
    assert http.post(f"{PATH}/count_tokens", json={"messages": turns}).status_code == 200


def test_stop_sequences_are_named(http: httpx.Client, server: Scripted) -> None:
    message = post(http, stop_sequences=["zz", "th"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "th")
    assert message["content"][0]["text"] == "Hello "
    assert comparable(assembled(stream(http, stop_sequences=["zz", "th"]))) == comparable(message)


def test_one_call_at_a_time(http: httpx.Client, server: Scripted) -> None:
    server.says(action(READ, LIST))
    message = post(http, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    server.says(action(READ))
    assert post(http, tool_choice={"type": "none"})["content"] == [{"type": "text", "text": ""}]


def test_the_varying_billing_header_never_reaches_the_model(http: httpx.Client, server: Scripted) -> None:
    def prompt(system: Any) -> str:
        post(http, system=system)
        return server.prompt

    def header(number: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number}fa;"

    rest = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    prompts = {prompt([{"type": "text", "text": header(number)}, rest]) for number in range(2)}
    prompts |= {prompt(f"{header(number)}\nYou are an agent.") for number in range(2)}
    prompts.add(prompt("You are an agent."))
    assert len(prompts) == 1
    assert "billing" not in prompts.pop()
    assert "x-anthropic" in prompt("About x-anthropic-billing-header: it varies.")


def test_history_is_rendered(http: httpx.Client, server: Scripted) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}, {"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Be quick."},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "print(1)"}, {"type": "image", "source": {}}],
                },
            ],
        },
    ]
    post(http, messages=messages)
    assert "<|START_TEXT|>Fix it.\nNow.<|END_TEXT|>" in server.prompt
    assert f"<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {READ}\n]" in server.prompt
    result, said = server.prompt.index("print(1)\\n[image left out]"), server.prompt.index("Be quick.")
    assert result < said


def test_tools_of_anthropics_servers_are_left_out(http: httpx.Client, server: Scripted) -> None:
    post(http, tools=[{"type": "web_search_20250305", "name": "web_search"}, TOOL])
    assert '"name": "read"' in server.prompt
    assert "web_search" not in server.prompt


def test_deferred_tools_are_shown_where_a_result_refers_to_them(http: httpx.Client, server: Scripted) -> None:
    fetch = {**TOOL, "name": "fetch", "description": "Get <a page>", "defer_loading": True}
    search = {"type": "tool_use", "id": "t1", "name": "find_tools", "input": {"query": "page"}}
    post(http, tools=[TOOL, fetch])
    first = server.prompt
    assert '"name": "read"' in first
    assert '"name": "fetch"' not in first
    found = [{"type": "tool_reference", "tool_name": name} for name in ("fetch", "unknown")]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [search]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}]},
    ]
    # Claude Code puts a tool into the list, deferred still, once it has been found.
    post(http, tools=[{**fetch, "name": "another"}, fetch, TOOL], messages=messages)
    assert server.prompt.startswith(first.removesuffix("<|START_THINKING|><|END_THINKING|>"))
    result = json.loads(
        "[" + server.prompt.rpartition("<|START_TOOL_RESULT|>[")[2].partition("]<|END")[0] + "]"
    )
    shown, unknown = result[0]["results"]["0"]["content"].split("\n")
    assert json.loads(shown.removeprefix("<function>").removesuffix("</function>")) == {
        "description": "Get <a page>",
        "name": "fetch",
        "parameters": TOOL["input_schema"],
    }
    assert unknown == "[tool_reference left out]"


def test_count_tokens(http: httpx.Client, server: Scripted) -> None:
    fields = body(system="Be brief.")
    del fields["max_tokens"]
    counted = http.post(f"{PATH}/count_tokens", json=fields).json()
    assert counted == {"input_tokens": post(http, system="Be brief.")["usage"]["input_tokens"]}


def test_small_models_by_name_are_the_one_model(http: httpx.Client) -> None:
    assert post(http, model="claude-haiku-4-5")["model"] == "claude-haiku-4-5"
    assert post(http, model="scripted")["model"] == "scripted"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "does not exist here"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": CONTEXT}, 400, "invalid_request_error", "prompt is too long"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "^stop_sequences: an empty"),
        ({"temperature": 9000}, 400, "invalid_request_error", "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            r"messages\[0\].content\[0\].type",
        ),
        (
            {"output_config": {"format": {"type": "xml"}}},
            400,
            "invalid_request_error",
            "output_config.format",
        ),
        ({"output_config": {"format": "json"}}, 400, "invalid_request_error", "output_config.format"),
        ({"tool_choice": {"type": "sometimes"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "^tool_choice.name: "),
        (
            {"tools": [{"name": "x", "type": "web_search"}, {"name": "", "input_schema": {}}]},
            400,
            "invalid_request_error",
            r"^tools\[1\].name: ",
        ),
        (
            {
                "tools": [
                    {"name": "later", "input_schema": {}, "defer_loading": True},
                    {"name": "now", "input_schema": {"type": "strin"}, "strict": True},
                ]
            },
            400,
            "invalid_request_error",
            r"^tools\[1\].input_schema: cannot be compiled",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            400,
            "invalid_request_error",
            r"^messages\[0\].content\[0\].tool_use_id: a tool's result needs the id of its call",
        ),
    ],
)
def test_errors_are_anthropics(
    http: httpx.Client, fields: dict[str, Any], status: int, kind: str, message: str
) -> None:
    response = http.post(PATH, json=body(**fields))
    assert response.status_code == status
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert re.search(message, error["error"]["message"])


def test_a_failure_in_the_stream_is_an_error_event() -> None:
    with scripted_server() as own, patient.client(own.url) as http:
        events = stream(http, messages=[{"role": "user", "content": "crash"}])
        assert events[0]["type"] == "message_start"
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"


def test_head_of_the_root_is_answered(http: httpx.Client) -> None:
    assert http.head("/").status_code == 200
