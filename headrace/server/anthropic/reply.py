"""What `POST /v1/messages` answers, in one object or as events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from headrace.server.conversation import Answers
from headrace.server.formats import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from headrace.server.json_text import parsed
from headrace.server.streaming import Dialect, named_event
from headrace.server.turn import Message

DIALECT = Dialect(
    encode=named_event,
    failure=lambda error: error.anthropic_body,
    alive=named_event({"type": "ping"}),
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageReply:
    """One message: blocks of thoughts, words and calls."""

    def __init__(self, model: str, answers: Answers) -> None:
        self._model = model
        self._answers = answers
        self._id = f"msg_{secrets.token_hex(12)}"

    def complete(self, message: Message) -> dict[str, Any]:
        """The whole answer."""
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _signature()})
        if message.content or not message.calls:
            blocks.append({"type": "text", "text": message.content})
        blocks += [
            {"type": "tool_use", "id": _call_id(), "name": call.name, "input": _parsed(call.arguments)}
            for call in message.calls
        ]
        return self._message(blocks) | self._end(message.finish_reason) | {"usage": self._usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The message's start, its blocks one after the other, why it ended, its end."""
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield {"type": "message_start", "message": start}
        blocks = _Blocks()
        reason = "stop"
        async for piece in self._answers.pieces():
            for event in piece.events:
                for each in blocks.take(event):
                    yield each
            reason = piece.finish_reason or reason
        for each in blocks.close():
            yield each
        yield {"type": "message_delta", "delta": self._end(reason), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _end(self, reason: str) -> dict[str, Any]:
        stop = self._answers.turns[0].stop_string
        return {
            "stop_reason": "stop_sequence" if stop is not None else _STOP_REASONS[reason],
            "stop_sequence": stop,
        }

    def _usage(self) -> dict[str, int]:
        """Token counts. `input_tokens` are those that were not cached, as Anthropic counts."""
        answers = self._answers
        return {
            "input_tokens": answers.prompt_tokens - answers.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answers.cached_tokens,
            "output_tokens": answers.completion_tokens,
        }


class _Blocks:
    """Turns events into blocks: one is open at a time, and an event of another kind closes it."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def take(self, event: Event) -> Iterable[dict[str, Any]]:
        match event:
            case Reasoning(text):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text):
                yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case CallStart(_, name):
                yield from self.close()
                block = {"type": "tool_use", "id": _call_id(), "name": name, "input": {}}
                yield from self._begin(block)
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                yield from self.close()

    def close(self) -> Iterable[dict[str, Any]]:
        """End the open block, if there is one."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature()})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _begin(self, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Open a block of this kind, unless it is open already."""
        if self._open == block["type"]:
            return
        yield from self.close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _signature() -> str:
    """Clients want one and send it back; thoughts are taken back as they are, so it signs nothing."""
    return secrets.token_hex(16)


def _parsed(arguments: str) -> Any:
    """A call's arguments as an object; there are none where a limit cut them off."""
    try:
        return parsed(arguments)
    except ValueError:
        return {}
