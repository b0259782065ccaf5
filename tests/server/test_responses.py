"""OpenAI's Responses protocol, as Codex speaks it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server import patient
from tests.server.north import action, call, text, thinks
from tests.server.replies import answer_of, events_of
from tests.server.scripted import CONTEXT, REPLY, Scripted, scripted_server
from tests.server.test_errors import error_of

PATH = "/v1/responses"
READ = call("read", {"path": "a.py"})
TOOL = {
    "type": "function",
    "name": "read",
    "description": "Read a file",
    "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch", "format": {"type": "grammar"}}


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    return answer_of(http.post(PATH, json={"input": "hi", "tools": [TOOL, PATCH], **fields}))


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(PATH, json={"input": "hi", "tools": [TOOL, PATCH], **fields, "stream": True})
    return parsed(response)


def parsed(response: httpx.Response) -> list[dict[str, Any]]:
    events = events_of(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def checked(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response. Items and their texts must be the sum of the events that told of them."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    deltas, is_open = "", False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        match kind.rsplit(".", 1):
            case ["output_item", "added"]:
                assert not is_open
                items.append(event["item"])
                deltas, is_open = "", True
            case ["output_item", "done"]:
                assert event["item"]["id"] == items[-1]["id"]
                assert deltas == said(event["item"])
                items[-1], is_open = event["item"], False
            case ["content_part", _]:
                assert event["part"]["type"] == "output_text"
            case [_, "delta"]:
                assert event["item_id"] == items[-1]["id"]
                deltas += event["delta"]
            case [_, "done"]:
                assert deltas in event.values()
    assert not is_open
    response = events[-1]["response"]
    assert response["output"] == items
    assert isinstance(response, dict)
    return response


def said(item: dict[str, Any]) -> Any:
    return item.get("arguments", item.get("input")) or "".join(part["text"] for part in item["content"])


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    random = ("id", "call_id", "created_at")
    output = [{key: value for key, value in item.items() if key not in random} for item in response["output"]]
    return {key: value for key, value in response.items() if key not in random} | {"output": output}


def test_thoughts_words_and_calls(http: httpx.Client, server: Scripted) -> None:
    line = thinks("I look.", text("First."), action(READ, call("list", {})))
    server.says(line, line)
    response = checked(stream(http))
    reasoning, message, read, listing = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I look."}]
    assert message["content"][0]["text"] == "First."
    assert (read["type"], read["name"], read["status"]) == ("function_call", "read", "completed")
    assert json.loads(read["arguments"]) == {"path": "a.py"}
    assert listing["arguments"] == "{}"
    assert read["call_id"] != listing["call_id"]
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("I look.") + 1
    assert comparable(post(http)) == comparable(response)


def test_free_text_tools(http: httpx.Client, server: Scripted) -> None:
    patch = '*** Begin Patch\n*** Update File: a.py\n-"x"\n+y\n*** End Patch'
    line = thinks("", action(call("apply_patch", {"input": patch})))
    server.says(line, line)
    response = checked(stream(http))
    [item] = response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert comparable(post(http)) == comparable(response)


def test_tools_in_namespaces(http: httpx.Client, server: Scripted) -> None:
    tools = [TOOL, {"type": "namespace", "name": "agents", "description": "Agents", "tools": [TOOL, PATCH]}]
    spoken = (call("agents__read", {"path": "a"}), call("agents__apply_patch", {"input": "+b"}), READ)
    server.says(thinks("Hm.", action(*spoken)))
    response = checked(stream(http, tools=tools))
    assert '"name": "agents__read"' in server.prompt
    assert '"name": "read"' in server.prompt
    calls = response["output"][1:]
    heads = [(item["type"], item.get("namespace"), item["name"]) for item in calls]
    assert heads == [
        ("function_call", "agents", "read"),
        ("custom_tool_call", "agents", "apply_patch"),
        ("function_call", None, "read"),
    ]
    assert calls[1]["input"] == "+b"
    result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "1"}
    post(http, tools=tools, input=[{"role": "user", "content": "hi"}, *response["output"], result])
    assert '"tool_name": "agents__read", "parameters": {"path": "a"}' in server.prompt
    chosen = {"type": "function", "namespace": "agents", "name": "read"}
    server.says(thinks("Hm.", action(call("agents__read", {"path": "a"}))))
    assert post(http, tools=tools, tool_choice=chosen)["output"][-1]["namespace"] == "agents"


def test_a_call_that_the_limit_cuts_is_incomplete(http: httpx.Client, server: Scripted) -> None:
    line = thinks("", "<|START_ACTION|>[" + READ)
    limit = len(server.tokenizer.encode(line)) - 4
    server.says(line, line)
    events = stream(http, max_output_tokens=limit)
    response = checked(events)
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert comparable(post(http, max_output_tokens=limit)) == comparable(response)


@pytest.mark.parametrize(
    "spoken", [READ, call("apply_patch", {"input": "*** Begin"})], ids=["function", "custom"]
)
@pytest.mark.parametrize("answered", [True, False])
def test_a_cut_call_can_be_sent_back(
    http: httpx.Client, server: Scripted, spoken: str, answered: bool
) -> None:
    line = thinks("Hm.", "<|START_ACTION|>[" + spoken)
    server.says(line)
    response = checked(stream(http, max_output_tokens=len(server.tokenizer.encode(line)) - 4))
    cut = response["output"][-1]
    assert cut["status"] == "incomplete"
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(said(cut))
    history = [{"role": "user", "content": "hi"}, *response["output"]]
    if answered:
        kind = f"{cut['type']}_output"
        history.append({"type": kind, "call_id": cut["call_id"], "output": "Cut off."})
    history.append({"role": "user", "content": "Go on."})
    again = post(http, input=history)
    assert again["output"][-1]["content"][0]["text"] == REPLY
    assert f'"tool_name": "{cut["name"]}"' in server.prompt
    assert ("Cut off." in server.prompt) == answered


def test_history_is_rendered(http: httpx.Client, server: Scripted) -> None:
    history = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"role": "user", "content": "Fix it."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Reading."}]},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"path": "a.py"}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** x"},
        {"type": "function_call_output", "call_id": "call_1", "output": "print(1)"},
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "Done"}, {"type": "input_image", "image_url": "x"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "content": None},
        {"type": "web_search_call", "id": "ws_1"},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    post(http, instructions="Be brief.", input=history)
    prompt = server.prompt
    assert prompt.index("Be brief.") < prompt.index("Rules.") < prompt.index("Fix it.")
    patch = call("apply_patch", {"input": "*** x"}, 1)
    turn = f"<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {READ},\n    {patch}\n]"
    assert turn in prompt
    assert (
        '"tool_call_id": "1",\n        "results": {\n            "0": {"content": "Done\\n[input_image'
        in prompt
    )
    assert "<|START_THINKING|>So.<|END_THINKING|>" in prompt


@pytest.mark.parametrize(("effort", "on"), [("none", False), ("medium", True), (None, True)])
def test_effort(http: httpx.Client, server: Scripted, effort: str | None, on: bool) -> None:
    post(http, reasoning={"effort": effort, "summary": "auto"})
    assert server.prompt.endswith("<|START_THINKING|>") == on


def test_sdk(sdk: openai.OpenAI, server: Scripted) -> None:
    answer = sdk.responses.create(model="scripted", input="hi")
    assert answer.output_text == REPLY
    server.says(thinks("I look.", text("First."), action(READ)))
    with sdk.responses.stream(model="scripted", input="hi", tools=[TOOL]) as events:  # type: ignore[list-item]
        for _ in events:
            pass
        final = events.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage is not None
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens


def test_the_form_that_was_asked_for_is_told(http: httpx.Client) -> None:
    assert post(http)["text"] == {"format": {"type": "text"}}
    form = {"type": "json_schema", "name": "anything", "schema": {"type": "object"}, "strict": False}
    text = {"format": form, "verbosity": "low"}
    assert post(http, text=text)["text"] == text
    assert stream(http, text=text)[0]["response"]["text"] == text


WRONG = {"type": "strin"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]},
            "input[1]",
        ),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters"),
        (
            {
                "tools": [
                    {"type": "web_search"},
                    {"type": "function", "name": "f", "parameters": WRONG, "strict": True},
                ]
            },
            "tools[1].parameters",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"max_output_tokens": CONTEXT}, "input"),
    ],
)
def test_errors(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(http.post(PATH, json={"input": "hi", **fields}), 400)["param"] == param


def test_a_failure_in_the_stream_is_a_failed_response() -> None:
    with scripted_server() as own, patient.client(own.url) as http:
        events = stream(http, input="crash")
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["message"]
