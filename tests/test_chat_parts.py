"""Thoughts, words and tool calls of an answer stand apart in the Python API and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace import LLM, SamplingParams
from headrace.cli.chat import _converse, _pieces, _speak
from headrace.client import Client, Piece
from headrace.load import Loaded
from headrace.model.markers import MARKERS
from headrace.model.tokenizer import Tokenizer
from headrace.server.turn import Call
from tests.server.scripted import (
    VOCABULARY,
    Scripted,
    ScriptedBackend,
    config,
    scripted_engine,
    scripted_server,
)

HI = [{"role": "user", "content": "hi"}]
THOUGHT = "It greets me.<|END_THINKING|><|START_TEXT|>Good day.<|END_TEXT|>"
CALLS = (
    "I look.<|END_THINKING|><|START_ACTION|>["
    '{"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "<|END_ACTION|>"}}'
    "]<|END_ACTION|>"
)


@pytest.fixture
def scripted() -> Iterator[tuple[LLM, ScriptedBackend]]:
    tokenizer = Tokenizer.synthetic(VOCABULARY)
    loaded = Loaded("scripted", cast(Any, SimpleNamespace(config=config())), tokenizer)
    engine = scripted_engine(tokenizer)
    with LLM.over(loaded, engine) as llm:
        yield llm, engine.backend


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted_server() as running:
        yield running


def test_chat_parts_thoughts_words_and_calls(scripted: tuple[LLM, ScriptedBackend]) -> None:
    llm, backend = scripted
    backend.says(THOUGHT, CALLS)
    [said] = llm.chat(HI)
    assert (said.reasoning, said.text, said.calls, said.finish_reason) == (
        "It greets me.",
        "Good day.",
        [],
        "stop",
    )
    [called] = llm.chat(HI)
    assert (called.reasoning, called.text, called.finish_reason) == ("I look.", "", "tool_calls")
    assert called.calls == [Call("read", '{"path": "<|END_ACTION|>"}', complete=True)]
    assert called.usage.completion_tokens == len(called.token_ids) > len(called.reasoning)


def test_a_stop_string_ends_words_and_not_thoughts(scripted: tuple[LLM, ScriptedBackend]) -> None:
    llm, backend = scripted
    backend.says(*[THOUGHT] * 3)
    params = SamplingParams(stop=["me", "day"])
    assert [(each.reasoning, each.text) for each in llm.chat([HI, HI], params)] == [
        ("It greets me.", "Good ")
    ] * 2
    pieces = list(llm.stream(HI, params))
    assert "".join(piece.reasoning for piece in pieces) == "It greets me."
    assert "".join(piece.text for piece in pieces) == "Good "
    assert pieces[-1].finish_reason == "stop"
    assert llm.generate("say {x}")[0].text == "x"  # nothing is left running


def test_the_terminal_shows_no_markers(
    scripted: tuple[LLM, ScriptedBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    llm, backend = scripted
    backend.says(THOUGHT, CALLS.replace("<|END_ACTION|>", "a", 1))
    said = [_speak(lambda messages: _pieces(llm, messages, SamplingParams()), HI) for _ in range(2)]
    assert said[0] == {"role": "assistant", "content": "Good day.", "reasoning": "It greets me."}
    assert said[1] == {"role": "assistant", "content": "", "reasoning": "I look."}
    printed = capsys.readouterr().out
    assert "It greets me.\nGood day.\n" in printed
    assert 'I look.\n[calls read] {"path": "a"}' in printed
    assert not any(marker in printed for marker in MARKERS)


def test_the_terminal_over_http_shows_thoughts_while_they_come(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.says(THOUGHT, CALLS)
    client = Client(server.url)
    pieces = list(client.chat(HI))
    first_word = next(i for i, piece in enumerate(pieces) if piece.text)
    assert first_word > 1
    assert "".join(piece.reasoning for piece in pieces[:first_word]) == "It greets me."
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    called = "".join(piece.call for piece in client.chat(HI, tools=[tool]))
    assert called.startswith("\n[calls read] ")
    assert json.loads(called.removeprefix("\n[calls read] ")) == {"path": "<|END_ACTION|>"}

    server.says(THOUGHT, THOUGHT)
    lines = iter(["hi", "again", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    _converse(lambda messages: client.chat(messages), [])
    assert capsys.readouterr().out.count("It greets me.\nGood day.\n") == 2
    assert "It greets me." in server.prompt  # thoughts are given back


def test_reasoning_under_the_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace import client

    delta = {"content": None, "reasoning_content": "Hm.", "tool_calls": None}
    assert client._piece(delta) == Piece(reasoning="Hm.")
    assert client._piece({"role": "assistant", "content": ""}) == Piece()
