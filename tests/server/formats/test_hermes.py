"""The second format, behind the same protocol."""

from __future__ import annotations

import pytest

from headrace.server.formats.hermes import HermesFormat
from tests.server.formats.parsing import Call, Parsed, parse

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
READ = Call("read", '{"path": "a"}', complete=True)


def hermes(text: str, prompt: str = "<|im_start|>assistant\n") -> Parsed:
    whole = parse(HermesFormat().parser(prompt), [text])
    assert parse(HermesFormat().parser(prompt), list(text)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <b>.", Parsed("", "Hello <b>.")),
        ("<think>\nhm\n</think>\n\nHello.", Parsed("\nhm\n", "\n\nHello.")),
        (CALL, Parsed(calls=[READ])),
        (f"Look:\n{CALL}\n{CALL}", Parsed("", "Look:\n", [READ, READ])),
        ('<tool_call>{"arguments": {}, "name": "f"}</tool_call>', Parsed(calls=[Call("f", "{}", True)])),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>',
            Parsed(calls=[Call("f", '{"a": "</tool_call>')]),
        ),
    ],
)
def test_answers(text: str, expected: Parsed) -> None:
    assert hermes(text) == expected


def test_thinking_that_the_prompt_opened() -> None:
    assert hermes("hm</think>Hello.", "assistant\n<think>\n") == Parsed("hm", "Hello.")


def test_thinking_is_switched_by_the_templates_variable() -> None:
    assert HermesFormat().variables("none")["enable_thinking"] is False
    assert HermesFormat().variables("high")["enable_thinking"] is True
