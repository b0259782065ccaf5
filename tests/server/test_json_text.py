"""JSON in calls that is nested deeper than Python's parser goes is text: no request fails for it."""

from __future__ import annotations

import pytest

from headrace.model import markers
from headrace.model.tokenizer import Tokenizer
from headrace.server import messages
from headrace.server.anthropic import reply
from headrace.server.formats import choose_format
from headrace.server.protocol import ChatBody
from headrace.server.responses import items
from headrace.server.responses import protocol as responses
from headrace.server.responses.protocol import ResponsesBody
from headrace.server.turn import Message
from tests.server.scripted import VOCABULARY

DEEP = "[" * 100_000


def test_arguments_that_come_back_stay_as_they_were() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": DEEP}}
    body = ChatBody(messages=[{"role": "assistant", "tool_calls": [call]}])  # type: ignore[list-item]
    [message] = messages.template_messages(body.messages)
    assert message["tool_calls"][0]["function"]["arguments"] == DEEP
    item = {"type": "function_call", "name": "f", "arguments": DEEP}
    [message] = responses.template_messages(ResponsesBody(input=[item]))
    assert message["tool_calls"][0]["function"]["arguments"] == DEEP


@pytest.mark.parametrize("key", ["tool_name", "parameters"])
def test_what_a_model_writes_is_read_to_its_end(key: str) -> None:
    parser = choose_format(Tokenizer.synthetic(VOCABULARY)).parser("")
    message = Message()
    written = f'{{"tool_name": "f", "{key}": {DEEP}{"]" * len(DEEP)}}}'
    message.add(parser.push(f"{markers.START_ACTION}[{written}]{markers.END_ACTION}"))
    message.add(parser.finish())
    [call] = message.calls
    assert (call.name, call.complete) == ("f", True)


def test_what_a_model_writes_is_told() -> None:
    assert reply._parsed(DEEP) == {}
    assert items._free_text(DEEP) == DEEP
