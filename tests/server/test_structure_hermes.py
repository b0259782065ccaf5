"""Structured output in Hermes's format, whose tags are text of several tokens, or tokens, or special ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import httpx
import pytest

from headrace.model.tokenizer import Tokenizer
from headrace.server.structure.answer import StructuredAnswer
from tests.server import patient
from tests.server.scripted import VOCABULARY, Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_errors import error_of
from tests.server.test_structure import FORMAT, ask, is_colours, tool

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}\n"
    "{% if reasoning_effort == 'high' %}<think>\n{% endif %}"
)
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PAINT = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red", "dark": true}}\n</tool_call>'


@cache
def tokenizer(kind: str) -> Tokenizer:
    made = Tokenizer.synthetic(VOCABULARY)
    if kind != "text":
        made._fast.add_tokens(TAGS, special_tokens=kind == "special")
        made = Tokenizer(made._fast, eos_token_ids=made.eos_token_ids)
    made.chat_template = TEMPLATE
    made._fast.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module", params=["text", "tokens", "special"])
def hermes(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    with scripted_server(tokenizer(request.param)) as server:
        yield server


@pytest.fixture
def http(hermes: Scripted) -> Iterator[httpx.Client]:
    with patient.client(hermes.url) as client:
        yield client


def thinks(effort: str) -> str:
    return "hm </thin</think>\n\n" if effort == "high" else ""


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("line", ["Hello.", PAINT, '{"colour": "green"', ""])
def test_words_keep_to_their_schema(http: httpx.Client, hermes: Scripted, line: str, effort: str) -> None:
    message = ask(http, hermes, thinks(effort) + line, response_format=FORMAT, reasoning_effort=effort)
    assert is_colours(message["content"])
    assert message["calls"] == []
    assert message["reasoning"] == ("hm </thin" if effort == "high" else "")


@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("line", ["I will not.", PAINT, PAINT.replace("red", "green"), '{"colour": '])
def test_a_required_call_is_made(http: httpx.Client, hermes: Scripted, line: str, effort: str) -> None:
    tools = [tool("paint"), tool("wash")]
    message = ask(
        http, hermes, thinks(effort) + line, tools=tools, tool_choice="required", reasoning_effort=effort
    )
    assert message["finish_reason"] == "tool_calls"
    assert message["content"] == ""
    assert {each["name"] for each in message["calls"]} <= {"paint", "wash"}
    assert all(is_colours(each["arguments"]) for each in message["calls"])
    assert message["reasoning"] == ("hm </thin" if effort == "high" else "")


def test_a_named_tool_is_called_once(http: httpx.Client, hermes: Scripted) -> None:
    choice = {"type": "function", "function": {"name": "wash"}}
    message = ask(http, hermes, f"{PAINT}\n{PAINT}", tools=[tool("paint"), tool("wash")], tool_choice=choice)
    assert [each["name"] for each in message["calls"]] == ["wash"]


def test_several_required_calls(http: httpx.Client, hermes: Scripted) -> None:
    message = ask(http, hermes, f"{PAINT}\n{PAINT}", tools=[tool("paint")], tool_choice="required")
    assert [each["name"] for each in message["calls"]] == ["paint", "paint"]


def test_words_stay_free_beside_strict_tools(http: httpx.Client, hermes: Scripted) -> None:
    strict = [tool("paint", strict=True)]
    message = ask(http, hermes, "Let me <b>think</b>.", tools=strict)
    assert (message["content"], message["calls"]) == ("Let me <b>think</b>.", [])
    message = ask(http, hermes, "Look:\n" + PAINT.replace("red", "green"), tools=strict)
    assert message["content"].startswith("Look:\n")  # the rest of the line can end up after the call
    assert is_colours(message["calls"][0]["arguments"])


def test_a_format_beside_tools(http: httpx.Client, hermes: Scripted) -> None:
    strict = [tool("paint", strict=True)]
    message = ask(http, hermes, "Hello.", tools=strict, response_format=FORMAT)
    assert bool(message["calls"]) != bool(message["content"])
    assert is_colours(message["content"] or message["calls"][0]["arguments"])
    message = ask(http, hermes, PAINT, tools=strict, response_format=FORMAT)
    assert is_colours(message["calls"][0]["arguments"])
    message = ask(http, hermes, '{"colour": "red", "dark": true}', tools=strict, response_format=FORMAT)
    assert is_colours(message["content"])


def test_a_schema_that_cannot_be_compiled_is_named(http: httpx.Client) -> None:
    wrong = tool("paint", parameters={"type": "object", "properties": {"a": {"type": "colour"}}})
    body = {"messages": user("hi"), "tools": [tool("wash"), wrong], "tool_choice": "required"}
    assert error_of(http.post(PATH, json=body), 400)["param"].startswith("tools[1]")


def test_the_gate_is_red_without_the_mask(
    http: httpx.Client, hermes: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StructuredAnswer, "mask", lambda self: None)
    message = ask(http, hermes, "I will not.", tools=[tool("paint")], tool_choice="required")
    assert (message["content"], message["calls"]) == ("I will not.", [])


def test_a_token_may_reach_beyond_the_thoughts() -> None:
    pieces = {1: b"hm</th", 2: b'ink>\n{"', 3: b"hm", 4: b"ink>\n", 5: b"ink>x"}

    def answer() -> tuple[StructuredAnswer, Grammar]:
        grammar = Grammar()
        made = StructuredAnswer(
            {}, end_thinking=b"</think>", outside=(), ends={9}, vocab_size=16, bytes_of=pieces.__getitem__
        )
        made._open = lambda: setattr(made, "_matcher", grammar)  # type: ignore[method-assign]
        return made, grammar

    for last, fed in ((2, ['{"']), (4, []), (5, ["x"])):
        made, grammar = answer()
        for token in (3, 1, last):
            made.accept(token)
        assert grammar.fed == [each.encode() for each in fed]
        assert (made._matcher is None) == (last == 5)


class Grammar:
    """Takes what begins an object."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []

    def accept_string(self, text: bytes) -> bool:
        self.fed.append(text)
        return text.startswith(b"{")
