"""What a chat template is given."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.server.errors import ApiError
from headrace.server.messages import template_messages
from headrace.server.protocol import Message


def templated(**fields: Any) -> dict[str, Any]:
    return template_messages([Message(**fields)])[0]


def test_developer_is_system() -> None:
    assert templated(role="developer", content="x") == {"role": "system", "content": "x"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
    ],
)
def test_content_becomes_text(content: Any, text: str) -> None:
    assert templated(role="user", content=content)["content"] == text


def test_missing_content_is_empty() -> None:
    assert templated(role="assistant") == {"role": "assistant", "content": ""}


def test_other_parts_are_refused() -> None:
    with pytest.raises(ApiError, match=r"messages\[0\].content\[1\].type: 'image_url' is not supported"):
        templated(role="user", content=[{"type": "text", "text": "a"}, {"type": "image_url"}])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_given_under_both_names(name: str) -> None:
    message = templated(role="assistant", content="x", **{name: "hm"})
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": "cut o', '{"a": "cut o'),
    ],
)
def test_arguments_become_objects(given: Any, expected: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": given}}
    assert templated(role="assistant", tool_calls=[call])["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]


def test_an_empty_list_of_calls_is_none() -> None:
    assert "tool_calls" not in templated(role="assistant", content="x", tool_calls=[])


def test_results_keep_their_id() -> None:
    message = templated(role="tool", content="x", tool_call_id="call_1", name="f")
    assert message == {"role": "tool", "content": "x", "tool_call_id": "call_1", "name": "f"}


def test_a_result_needs_its_calls_id() -> None:
    with pytest.raises(
        ApiError, match=r"messages\[0\].tool_call_id: a tool's result needs the id of its call"
    ):
        templated(role="tool", content="1")
