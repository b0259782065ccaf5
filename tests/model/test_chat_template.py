"""North's chat format, string for string, as transformers renders the template."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2
import pytest

from headrace.model.tokenizer import ChatTemplateError, Tokenizer, north_chat_template

PLATFORM = (
    "These instructions are always to be followed and cannot be overridden by subsequent system or user "
    "turns:\n- You will answer requests for educational, informative, or creative content related to safety "
    "categories. You will not provide content that is harmful or could be used to cause harm.\n\n"
    "These instructions serve as your defaults, but they can be overridden in subsequent system or user "
    "turns:\n- Your name is North Mini Code.\n- You are a large language model built by Cohere."
)
TURN, END = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
NO_TOOLS = "\n\n# Available Tools\n```json\n[\n\n]\n```"
HEAD = f"<BOS_TOKEN>{TURN}<|SYSTEM_TOKEN|><|START_TEXT|>{PLATFORM}{NO_TOOLS}<|END_TEXT|>{END}"
HI = f"{TURN}<|USER_TOKEN|><|START_TEXT|>Hi<|END_TEXT|>{END}"
PROMPT = f"{TURN}<|CHATBOT_TOKEN|><|START_THINKING|>"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.synthetic(300)


def user(text: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(identifier: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(identifier: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def test_plain_conversation() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        user(),
        {"role": "assistant", "content": "Hello."},
        user(),
    ]
    expected = (
        f"{HEAD}{TURN}<|SYSTEM_TOKEN|><|START_TEXT|>Be brief.<|END_TEXT|>{END}{HI}"
        f"{TURN}<|CHATBOT_TOKEN|><|START_TEXT|>Hello.<|END_TEXT|>{END}{HI}"
    )
    assert tokenizer().render_chat(messages, add_generation_prompt=False) == expected
    assert tokenizer().render_chat(messages) == expected + PROMPT


@pytest.mark.parametrize(
    ("variables", "thinks"),
    [
        ({}, True),
        ({"reasoning": True}, True),
        ({"reasoning": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning": True, "reasoning_effort": "none"}, True),
        ({"enable_thinking": False}, True),
    ],
)
def test_reasoning_switch(variables: dict[str, Any], thinks: bool) -> None:
    text = tokenizer().render_chat([user()], **variables)
    assert text == HEAD + HI + PROMPT + ("" if thinks else "<|END_THINKING|>")


def test_tools_are_listed_with_their_schema() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "Où?"}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "description": 'The "sky".', "parameters": schema},
        },
        {"type": "function", "function": {"name": "time", "description": "The hour.", "parameters": {}}},
    ]
    expected = (
        "# Available Tools\n```json\n[\n"
        '    {"name": "weather", "description": "The "sky".", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string", "description": "Où?"}}}, "responses": null},\n'
        '    {"name": "time", "description": "The hour.", "parameters": {}, "responses": null}\n]\n```'
        "<|END_TEXT|>"
    )
    assert (
        tokenizer().render_chat([user()], tools=tools)
        == HEAD.replace(NO_TOOLS + "<|END_TEXT|>", "\n\n" + expected) + HI + PROMPT
    )


def test_calls_and_results_are_numbered_over_the_conversation() -> None:
    messages = [
        user(),
        {
            "role": "assistant",
            "content": "not shown",
            "reasoning": "Look.",
            "tool_calls": [call("call_x", "weather", {"city": "Paris"}), call("call_y", "time", {})],
        },
        result("call_y", "noon"),
        result("call_x", [{"type": "text", "text": "15C"}, {"type": "text", "text": "sunny"}]),
        {"role": "assistant", "content": None, "tool_calls": [call("call_z", "weather", {"city": "Köln"})]},
        result("call_z", '{"x": 1}'),
    ]
    expected = (
        f"{HEAD}{HI}{TURN}<|CHATBOT_TOKEN|><|START_THINKING|>Look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>'
        + END
        + f"{TURN}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n"
        '    {\n        "tool_call_id": "1",\n        "results": {\n'
        '            "0": {"content": "noon"}\n        },\n        "is_error": null\n    },\n'
        '    {\n        "tool_call_id": "0",\n        "results": {\n'
        '            "0": {"content": "15C"},\n            "1": {"content": "sunny"}\n        },\n'
        '        "is_error": null\n    }\n]<|END_TOOL_RESULT|>'
        + END
        + f"{TURN}<|CHATBOT_TOKEN|><|START_ACTION|>[\n"
        '    {"tool_call_id": "2", "tool_name": "weather", "parameters": {"city": "Köln"}}\n]<|END_ACTION|>'
        + END
        + f"{TURN}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n"
        '    {\n        "tool_call_id": "2",\n        "results": {\n'
        '            "0": {"content": "{\\"x\\": 1}"}\n        },\n        "is_error": null\n    }\n]'
        f"<|END_TOOL_RESULT|>{END}{PROMPT}"
    )
    assert tokenizer().render_chat(messages) == expected


def test_a_repeated_id_belongs_to_its_first_call() -> None:
    """Why the server must hand out unique ids: the second result is labelled with the first call's number."""
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call("0", "time", {})]},
        result("0", "noon"),
    ]
    text = tokenizer().render_chat([user(), *turn, *turn])
    assert '"tool_call_id": "1", "tool_name"' in text
    assert text.count('"tool_call_id": "0",\n') == 2
    kept = tokenizer().render_chat([user(), *turn, *turn], regen_tool_call_ids=False)
    assert '"tool_call_id": "1"' not in kept
    assert '"tool_call_id": "lost",\n' in tokenizer().render_chat([user(), *turn, result("lost", "x")])


@pytest.mark.parametrize(
    "message",
    [
        {"content": "A", "reasoning": "R"},
        {"content": "A", "reasoning_content": "R"},
        {"content": "A", "thinking": "R"},
        {"content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "A"}]},
    ],
)
def test_reasoning_of_a_past_turn(message: dict[str, Any]) -> None:
    messages = [user(), {"role": "assistant", **message}]
    turn = f"{TURN}<|CHATBOT_TOKEN|>{{}}<|START_TEXT|>A<|END_TEXT|>{END}"
    shown = tokenizer().render_chat(messages, add_generation_prompt=False)
    assert shown == HEAD + HI + turn.format("<|START_THINKING|>R<|END_THINKING|>")
    left_out = tokenizer().render_chat(messages, add_generation_prompt=False, skip_thinking=True)
    assert left_out == HEAD + HI + turn.format("")


def test_platform_text_can_be_replaced() -> None:
    text = tokenizer().render_chat([user()], platform_instruction_override="Obey.")
    assert text == HEAD.replace(PLATFORM, "Obey.") + HI + PROMPT


def test_unknown_roles_render_nothing() -> None:
    messages = [{"role": "developer", "content": "x"}, user()]
    assert tokenizer().render_chat(messages) == HEAD + HI + PROMPT


def test_the_rendering_does_not_depend_on_trimmed_blocks() -> None:
    """White space between tags never shows, whichever Jinja environment renders the template."""
    tools = [{"name": "f", "description": "d", "parameters": {}}]
    messages = [user(), {"role": "assistant", "tool_calls": [call("a", "f", {})]}, result("a", "1")]
    environment = jinja2.Environment()
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    text = environment.from_string(north_chat_template()).render(
        messages=messages, tools=tools, bos_token="<BOS_TOKEN>", add_generation_prompt=True
    )
    assert text == tokenizer().render_chat(messages, tools=tools)


def test_every_marker_becomes_one_token() -> None:
    ids = tokenizer().apply_chat_template([user()])
    assert tokenizer().decode(ids, skip_special_tokens=False) == HEAD + HI + PROMPT
    assert sum(tokenizer().token_text(token).startswith("<|") for token in ids) == 13


def test_a_message_of_the_wrong_shape_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="cannot render"):
        tokenizer().render_chat([{"role": "assistant", "tool_calls": [{"function": {}}]}])
