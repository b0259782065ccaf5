"""Every known client does a task in two turns, with the tokenizer and template of north-micro."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.model.tokenizer import Tokenizer
from tests.server import patient, test_anthropic, test_responses
from tests.server.formats.test_choice import NORTH_MICRO
from tests.server.north import action, call, joined, text, thinks
from tests.server.recorded import CLIENTS, RESULT, Recorded
from tests.server.replies import events_of
from tests.server.scripted import Scripted, scripted_server
from tests.server.test_chat import events

CALL = call("bash", {"command": "cat a.py # é\n"})
CALLS = thinks("I look into the file.", action(CALL))
WORDS = thinks("I know it now.", text("It prints 1."))


@pytest.fixture(scope="module")
def micro() -> Iterator[Scripted]:
    with scripted_server(Tokenizer.from_pretrained(NORTH_MICRO)) as server:
        yield server


def ask(server: Scripted, client: Recorded, body: dict[str, Any]) -> dict[str, Any]:
    """What the client makes of the server's answer to `body`: the message as the client would keep it."""
    response = patient.post(server.url + client.path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message | {"reasoning": message.get("reasoning", "")}
    if client.path.startswith("/v1/messages"):
        return test_anthropic.assembled(events_of(response))
    if client.path == "/v1/responses":
        return test_responses.checked(test_responses.parsed(response))
    message = joined(chunk for chunk in events(response) if chunk["choices"])
    keys = ("name", "arguments")
    calls = [
        {"id": each["id"], "type": "function", "function": {key: each[key] for key in keys}}
        for each in message["calls"]
    ]
    return message | {"tool_calls": calls}


def words(answer: dict[str, Any]) -> str:
    """The text of an answer in any protocol."""
    content = answer.get("content")
    if isinstance(content, str):
        return content
    parts = content if content is not None else answer["output"][-1]["content"]
    return str(parts[-1]["text"])


@pytest.mark.parametrize("name", CLIENTS)
def test_two_turns(micro: Scripted, name: str) -> None:
    client = CLIENTS[name]
    micro.says(CALLS if client.wants_tools else WORDS, WORDS)
    first = ask(micro, client, client.first)
    first_prompt = micro.prompt
    assert "What does a.py print?" in first_prompt
    second = ask(micro, client, client.next_body(first))
    assert words(second) == "It prints 1."
    assert "<|" not in words(second)
    # What was said stays as it was, to the token, which is what a prefix cache lives on.
    opening = first_prompt.removesuffix("<|START_THINKING|>")
    assert micro.prompt.startswith(opening)
    if client.wants_tools:
        assert f"<|START_ACTION|>[\n    {CALL}\n]<|END_ACTION|>" in micro.prompt
        assert f'"results": {{\n            "0": {{"content": "{RESULT}"}}' in micro.prompt
    if name in ("OpenCode", "pi", "LiteLLM", "Claude Code", "Codex"):  # those that give the thoughts back
        assert micro.prompt.removeprefix(first_prompt).startswith(f"{CALLS}<|END_OF_TURN_TOKEN|>")
