"""What `POST /v1/responses` answers, in one object or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from headrace.server.conversation import Answers
from headrace.server.errors import ApiError
from headrace.server.responses.items import Items
from headrace.server.responses.protocol import ResponsesBody
from headrace.server.responses.tools import wire_names
from headrace.server.streaming import Dialect, named_event
from headrace.server.turn import LENGTH, Message


class ResponseReply:
    """One response: items of thoughts, words and calls."""

    def __init__(self, model: str, body: ResponsesBody, answers: Answers) -> None:
        self.dialect = Dialect(encode=self._numbered, failure=self._failed)
        self._model = model
        self._body = body
        self._answers = answers
        self._items = Items(wire_names(body.tools))
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._count = 0

    def complete(self, message: Message) -> dict[str, Any]:
        """The whole answer."""
        for event in message.events():
            self._items.take(event)
        self._items.close(complete=message.finish_reason != LENGTH)
        return self._ended(message.finish_reason)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The response's start, its items one after the other, its end with all that was said."""
        start = self._response("in_progress")
        yield {"type": "response.created", "response": start}
        yield {"type": "response.in_progress", "response": start}
        reason = ""
        async for piece in self._answers.pieces():
            for event in piece.events:
                for each in self._items.take(event):
                    yield each
            reason = piece.finish_reason or reason
        for each in self._items.close(complete=reason != LENGTH):
            yield each
        response = self._ended(reason)
        yield {"type": f"response.{response['status']}", "response": response}

    def _ended(self, reason: str) -> dict[str, Any]:
        if reason != LENGTH:
            return self._response("completed")
        return self._response("incomplete") | {"incomplete_details": {"reason": "max_output_tokens"}}

    def _failed(self, error: ApiError) -> dict[str, Any]:
        """A failure after the stream has begun; the code is one that clients retry."""
        described = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": self._response("failed") | {"error": described}}

    def _numbered(self, event: Any) -> str:
        """Every event has a number, by which clients put them in order."""
        number, self._count = self._count, self._count + 1
        return named_event({**event, "sequence_number": number})

    def _response(self, status: str) -> dict[str, Any]:
        body, started = self._body, status == "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if started else self._items.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": self._text(),
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if started else self._usage(),
        }

    def _text(self) -> dict[str, Any]:
        """The form that was asked for."""
        asked = (
            {} if self._body.text is None else self._body.text.model_dump(by_alias=True, exclude_none=True)
        )
        return {"format": {"type": "text"}} | asked

    def _usage(self) -> dict[str, Any]:
        answers = self._answers
        return {
            "input_tokens": answers.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answers.cached_tokens},
            "output_tokens": answers.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answers.reasoning_tokens},
            "total_tokens": answers.prompt_tokens + answers.completion_tokens,
        }
