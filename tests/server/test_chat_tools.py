"""Tools and reasoning through chat completions, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.north import action, call, joined, text, thinks
from tests.server.scripted import Scripted
from tests.server.test_chat import PATH, TOOL, events, user

READ = call("read", {"path": "a.py"})
WRITE = call("write", {"path": "b.py", "text": 'if a < b:\n    print("<|END_ACTION|>")\n'}, 1)
# Not strict: the script may then call what it likes.
LOOSE = {**TOOL, "function": {**TOOL["function"], "strict": False}}
BODY: dict[str, Any] = {"messages": user("hi"), "tools": [LOOSE]}


def whole(http: httpx.Client, server: Scripted, line: str, **fields: Any) -> dict[str, Any]:
    """A plain request's answer in the form that `joined` gives; the streamed one must be the same."""
    server.says(line, line)
    answer = http.post(PATH, json=BODY | fields).json()
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
    result = {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }
    streamed = joined(events(http.post(PATH, json=BODY | fields | {"stream": True})))
    assert without_ids(streamed) == without_ids(result)
    ids = [each["id"] for message in (result, streamed) for each in message["calls"]]
    assert len(set(ids)) == len(ids)
    assert all(each.startswith("call_") for each in ids)
    return result


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: value for key, value in each.items() if key != "id"} for each in message["calls"]]
    return message | {"calls": calls}


def test_thoughts_and_two_calls(http: httpx.Client, server: Scripted) -> None:
    answer = whole(http, server, thinks("I look.\n", action(READ, WRITE)))
    assert answer["reasoning"] == "I look.\n"
    assert answer["content"] == ""
    assert answer["finish_reason"] == "tool_calls"
    assert [each["name"] for each in answer["calls"]] == ["read", "write"]
    written = json.loads(answer["calls"][1]["arguments"])["text"]
    assert written == 'if a < b:\n    print("<|END_ACTION|>")\n'


def test_content_of_a_message_with_calls_alone_is_null(http: httpx.Client, server: Scripted) -> None:
    server.says(action(READ))
    message = http.post(PATH, json=BODY).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


def test_text_and_a_call(http: httpx.Client, server: Scripted) -> None:
    answer = whole(http, server, thinks("hm", text("First I read."), action(READ)))
    assert (answer["content"], answer["finish_reason"]) == ("First I read.", "tool_calls")


def test_an_action_inside_thinking_leaks_nothing(http: httpx.Client, server: Scripted) -> None:
    answer = whole(http, server, "I look." + action(READ))
    assert (answer["reasoning"], answer["content"], len(answer["calls"])) == ("I look.", "", 1)


def test_no_arguments_are_an_empty_object(http: httpx.Client, server: Scripted) -> None:
    answer = whole(http, server, thinks("", action('{"tool_name": "list", "parameters": {}}')))
    assert answer["calls"][0]["arguments"] == "{}"


@pytest.mark.parametrize("cut", [3, 20, 40, 55, len(READ) - 1])
def test_a_call_that_the_limit_cuts_ends_in_length(http: httpx.Client, server: Scripted, cut: int) -> None:
    tokens = server.tokenizer.encode(thinks("hm", "<|START_ACTION|>[", READ[:cut]))
    answer = whole(http, server, thinks("hm", "<|START_ACTION|>[", READ, "]"), max_tokens=len(tokens))
    assert answer["finish_reason"] == "length"
    assert answer["content"] == ""


def test_one_cut_off_call_can_be_sent_back(http: httpx.Client, server: Scripted) -> None:
    server.says(thinks("hm", "<|START_ACTION|>[", READ))
    limit = len(server.tokenizer.encode(thinks("hm", "<|START_ACTION|>[", READ[:-4])))
    first = http.post(PATH, json=BODY | {"max_tokens": limit}).json()["choices"][0]
    assert first["finish_reason"] == "length"
    cut = first["message"]
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(cut["tool_calls"][0]["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": cut["tool_calls"][0]["id"], "content": "not JSON"}
    again = http.post(PATH, json=BODY | {"messages": [*user("hi"), cut, result]})
    assert again.status_code == 200


def test_parallel_calls_can_be_switched_off(http: httpx.Client, server: Scripted) -> None:
    answer = whole(http, server, thinks("hm", action(READ, WRITE)), parallel_tool_calls=False)
    assert [each["name"] for each in answer["calls"]] == ["read"]
    assert json.loads(answer["calls"][0]["arguments"]) == {"path": "a.py"}
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_calls_that_nobody_may_make_are_dropped(
    http: httpx.Client, server: Scripted, fields: dict[str, Any]
) -> None:
    answer = whole(http, server, thinks("hm", text("Words."), action(READ)), **fields)
    assert answer["calls"] == []
    assert (answer["content"], answer["finish_reason"]) == ("Words.", "stop")


def test_stop_strings_are_looked_for_in_content_only(http: httpx.Client, server: Scripted) -> None:
    line = thinks("One STOP two", text("Three. STOP four"), action(READ))
    answer = whole(http, server, line, stop=["STOP"])
    assert (answer["reasoning"], answer["content"]) == ("One STOP two", "Three. ")
    assert (answer["calls"], answer["finish_reason"]) == ([], "stop")
    line = thinks("", action(call("read", {"path": "STOP"})))
    assert whole(http, server, line, stop="STOP")["calls"][0]["arguments"] == '{"path": "STOP"}'


def test_what_might_have_been_a_stop_string_comes_before_the_call(
    http: httpx.Client, server: Scripted
) -> None:
    answer = whole(http, server, thinks("", text("It is ST"), action(READ)), stop="STOP")
    assert (answer["content"], len(answer["calls"])) == ("It is ST", 1)
    assert whole(http, server, thinks("", text("It is ST")), stop="STOP")["content"] == "It is ST"


def test_a_stop_string_ends_the_work(http: httpx.Client, server: Scripted) -> None:
    server.begins("<|END_THINKING|><|START_TEXT|>STOP" + "a" * 100)
    answer = http.post(PATH, json=BODY | {"stop": "STOP"}).json()
    assert answer["usage"]["completion_tokens"] == 2 + len("STOP")
    server.wait_idle()  # by itself it never ends


def test_usage_counts_reasoning(http: httpx.Client, server: Scripted) -> None:
    server.says(thinks("hm", text("ok")))
    usage = http.post(PATH, json=BODY).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3  # two letters and the marker
    assert usage["completion_tokens"] == 3 + 4 + 1


def test_logprobs_are_those_of_the_answers_words(http: httpx.Client, server: Scripted) -> None:
    server.says(*[thinks("hm", text("ok"), action(READ))] * 2)
    choice = http.post(PATH, json=BODY | {"logprobs": True}).json()["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["o", "k"]
    chunks = events(http.post(PATH, json=BODY | {"logprobs": True, "stream": True}))
    entries = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["content"][0]["token"] for entry in entries if entry] == ["o", "k"]


def test_arguments_stream_as_they_are_made(http: httpx.Client, server: Scripted) -> None:
    server.says(thinks("", action(call("write", {"text": "x" * 200}))))
    chunks = events(http.post(PATH, json=BODY | {"stream": True}))
    pieces = [
        part["function"]["arguments"]
        for chunk in chunks
        for part in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(pieces) > 200  # a token a character, and every one at once


def test_the_next_turn_renders_it_all_back(http: httpx.Client, server: Scripted) -> None:
    server.says(thinks("I look.", action(READ)))
    message = http.post(PATH, json=BODY).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "print(1)"}
    http.post(PATH, json=BODY | {"messages": [*user("hi"), message, result]})
    said = (
        "<|CHATBOT_TOKEN|><|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n"
        f"    {READ}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>"
    )
    assert said in server.prompt  # to the letter what the model wrote, with its own number for the call
    assert '"tool_call_id": "0",\n        "results"' in server.prompt


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("thought", ["I thought.", ""])
def test_reasoning_is_taken_back_under_both_names(
    http: httpx.Client, server: Scripted, name: str, thought: str
) -> None:
    said = {"role": "assistant", "content": "Yes.", name: thought}
    assert http.post(PATH, json={"messages": [*user("a"), said, *user("b")]}).status_code == 200
    block = f"<|START_THINKING|>{thought}<|END_THINKING|>" if thought else ""
    assert f"<|CHATBOT_TOKEN|>{block}<|START_TEXT|>Yes.<|END_TEXT|>" in server.prompt


@pytest.mark.parametrize(("effort", "on"), [("none", False), ("low", True), ("high", True), (None, True)])
def test_effort_switches_reasoning(
    http: httpx.Client, server: Scripted, effort: str | None, on: bool
) -> None:
    message = http.post(PATH, json=BODY | {"reasoning_effort": effort}).json()["choices"][0]["message"]
    assert server.prompt.endswith("<|START_THINKING|>") == on
    assert message["content"] == "Hello there."


def test_sdk_collects_the_calls(sdk: openai.OpenAI, server: Scripted) -> None:
    server.says(thinks("hm", action(READ, WRITE)))
    with sdk.chat.completions.stream(
        model="scripted",
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}],
    ) as stream:
        answer = stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [each.function.name for each in calls] == ["read", "write"]
    assert json.loads(calls[0].function.arguments) == {"path": "a.py"}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (answer.choices[0].message.model_extra or {})["reasoning"] == "hm"


def test_interrupted_histories_are_rendered(http: httpx.Client) -> None:
    """A user who speaks before all results are in, and calls of tools that are gone."""
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "gone", "arguments": "{}"}}],
    }
    assert http.post(PATH, json=BODY | {"messages": [*user("a"), message, *user("wait")]}).status_code == 200
