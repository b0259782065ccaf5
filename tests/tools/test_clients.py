"""The harness for real clients: the script, the verdict, and a whole task with the client that is at hand."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.request import Request
from headrace.load import resolve
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import Tokenizer
from tools.clients import install, task
from tools.clients.catalogue import AIDER, CLIENTS, OPENAI_SDK, OPENCODE, filled
from tools.clients.install import Installed, NotInstallableError, Package
from tools.clients.script import MENDED, REPORT, TITLE, answer, arguments, offered
from tools.clients.server import Exchange, served
from tools.clients.task import FAILED, PASSED, perform, reusable_tokens, verdict

HERE = Installed(Path(sys.executable).parent, (Path(sys.executable).parent,))
DONE = REPORT.format(result=5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve("north-micro"))


def tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


def asked(tokenizer: Tokenizer, *tools: dict[str, Any], said: str = "Mend /w/adder.py.") -> str:
    return tokenizer.render_chat([{"role": "user", "content": said}], tools=tools)


def called(turn: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the one call in a turn."""
    listed = turn.partition("<|START_ACTION|>")[2].removesuffix("<|END_ACTION|>")
    [call] = json.loads(listed)
    return call["tool_name"], call["parameters"]


def test_tools_are_read_from_the_prompt(tokenizer: Tokenizer) -> None:
    text = {"type": "string"}
    tricky = 'Says:\n    {"name": "fake", "description": "x", "parameters": {broken", "parameters": {"a": 1}'
    prompt = asked(tokenizer, tool("read", path=text), tool("bash", tricky, command=text))
    found = {each.name: list(each.schema.get("properties", {})) for each in offered(prompt)}
    assert found["read"] == ["path"]
    assert found["bash"] == ["command"]


def test_arguments_keep_to_the_schema() -> None:
    text = {"type": "string"}
    edit = {
        "type": "object",
        "properties": {"oldText": text, "newText": text},
        "required": ["oldText", "newText"],
    }
    schema = {
        "properties": {
            "file_path": text,
            "edits": {"type": "array", "items": edit},
            "command": {"type": "array", "items": text},
            "mode": {"enum": ["fast", "slow"]},
            "limit": {"type": "integer"},
            "note": text,
        },
        "required": ["file_path", "edits", "command", "mode", "note"],
    }
    values = {"filepath": "/a", "edits": "", "oldtext": "x", "newtext": "y", "command": "ls"}
    assert arguments(schema, values) == {
        "file_path": "/a",
        "edits": [{"oldText": "x", "newText": "y"}],
        "command": ["bash", "-c", "ls"],
        "mode": "fast",
        "note": "as asked",
    }


def test_steps_follow_what_the_prompt_holds(tokenizer: Tokenizer) -> None:
    text = {"type": "string"}
    tools = (tool("Read", file_path=text), tool("Write", path=text, content=text), tool("Bash", command=text))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend /w/adder.py."}]
    expected = [
        ("Read", {"file_path": "/w/adder.py"}),
        ("Write", {"path": "/w/adder.py", "content": MENDED}),
        ("Bash", {"command": "python3 /w/check.py"}),
    ]
    for number, (name, given) in enumerate(expected):
        turn = answer(tokenizer.render_chat(messages, tools=tools))
        assert "<|END_THINKING|>" in turn
        assert called(turn) == (name, given)
        call = {"id": str(number), "function": {"name": name, "arguments": given}}
        result = "add(2, 3) = 5" if name == "Bash" else "done"
        messages += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(number), "content": result},
        ]
    assert f"<|START_TEXT|>{DONE}<|END_TEXT|>" in answer(tokenizer.render_chat(messages, tools=tools))
    # What it reports is what the check printed, not what it should have printed.
    messages[-1]["content"] = "add(2, 3) = -1"
    assert REPORT.format(result=-1) in answer(tokenizer.render_chat(messages, tools=tools))


def test_without_reasoning_there_are_no_thoughts(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.render_chat([{"role": "user", "content": "A title"}], reasoning_effort="none")
    assert answer(prompt) == f"<|START_TEXT|>{TITLE}<|END_TEXT|>"


def test_blocks_for_agents_without_tools(tokenizer: Tokenizer) -> None:
    first = answer(asked(tokenizer, said="Use SEARCH/REPLACE blocks."))
    again = answer(asked(tokenizer, said="Use SEARCH/REPLACE blocks. It printed: add(2, 3) = 6"))
    assert "return a * b\n>>>>>>> REPLACE" in first
    assert "return a * b\n=======\n    return a + b" in again


def test_a_whole_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "FOLDER", tmp_path)
    with served() as running:
        outcome = perform(OPENAI_SDK, HERE, "here", running)
    assert (outcome.result, outcome.reason) == (PASSED, "")
    assert outcome.turns == 4
    # All that could be used again was, but for the blocks that prompts end in.
    assert outcome.reusable_tokens - 4 * 64 < outcome.cached_tokens <= outcome.reusable_tokens
    lines = (tmp_path / "runs" / "openai-sdk" / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == [200] * 4
    assert json.loads(lines[-1])["body"]["messages"][-1]["content"] == "add(2, 3) = 5\nexit code 0"


def test_a_model_that_mends_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "FOLDER", tmp_path)
    with served(script=lambda prompt: f"<|END_THINKING|><|START_TEXT|>{DONE}<|END_TEXT|>") as running:
        outcome = perform(OPENAI_SDK, HERE, "here", running)
    assert (outcome.result, outcome.reason) == (FAILED, "adder.py is not mended")


def exchanges(status: int = 200, number: int = 2) -> list[Exchange]:
    return [Exchange("POST", "/v1/chat/completions", {}, status=status, reply=b"no") for _ in range(number)]


def test_verdicts() -> None:
    good = (OPENCODE, 0, f"... {DONE}", MENDED, exchanges())
    assert verdict(*good) == ""
    assert verdict(AIDER, 0, "", MENDED, exchanges()) == ""
    bad = {
        "no end": (OPENCODE, None, DONE, MENDED, exchanges()),
        "exit code": (OPENCODE, 1, DONE, MENDED, exchanges()),
        "file": (OPENCODE, 0, DONE, "", exchanges()),
        "refused": (OPENCODE, 0, DONE, MENDED, [*exchanges(), *exchanges(400)]),
        "one turn": (OPENCODE, 0, DONE, MENDED, exchanges(number=1)),
        "silent": (OPENCODE, 0, "", MENDED, exchanges()),
    }
    reasons = {name: verdict(*case) for name, case in bad.items()}
    assert all(reasons.values()), reasons
    assert len(set(reasons.values())) == len(bad)


def test_what_could_be_used_again() -> None:
    def request(prompt: list[int], output: list[int]) -> Request:
        made = Request(prompt, SamplingParams(), lambda output: None, 8, frozenset())
        made.output = output
        return made

    requests = [request([1, 2, 3], [4]), request([1, 2, 3, 4, 5], [6]), request([1, 9], [])]
    assert reusable_tokens(requests) == 4 + 1


def test_what_is_not_there_is_not_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotInstallableError, match="npm is not on this machine"):
        install.install("opencode", OPENCODE.package)
    with pytest.raises(NotInstallableError):
        install.install("opencode", dataclasses.replace(OPENCODE.package))  # nothing half-done counts


def test_a_failing_installer_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    (tmp_path / "npm").write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NotInstallableError, match="no such package"):
        install.install("it", Package("npm", "it", "1"))


def test_the_catalogue_fills_in() -> None:
    values = {"url": "http://x", "model": "m", "work": "/w", "task": "t", "home": "/h", "tools": "/t"}
    for client in CLIENTS:
        texts = [*client.command, *client.settings.values(), *client.environment.values()]
        whole = "".join(filled(text, values) for text in texts)
        assert "http://x" in whole
        assert not any(f"{{{key}}}" in whole for key in values), client.name
    assert len({client.name for client in CLIENTS}) == len(CLIENTS) == 9
