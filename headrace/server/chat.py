"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.model.sampling import TokenLogprobs
from headrace.server.conversation import Answers, Conversation, Piece, answer
from headrace.server.disconnect import unless_gone
from headrace.server.formats import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from headrace.server.logprobs import chat_logprobs
from headrace.server.messages import template_messages, template_variables, text_schema
from headrace.server.protocol import ChatBody
from headrace.server.sampling import chat_sampling
from headrace.server.state import ServerState
from headrace.server.streaming import EventStream
from headrace.server.tools import chat_tools, tool_policy
from headrace.server.turn import Message
from headrace.server.usage import usage


def router(state: ServerState) -> APIRouter:
    """The endpoint, serving `state`."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        state.check_model(body.model)
        answers = await answer(state, conversation(state, body))
        reply = ChatReply(state, body, answers)
        if body.stream:
            return EventStream(reply.events(), answers.generation, keep_alive=state.keep_alive)
        messages = await unless_gone(request.receive, answers.collect())
        return JSONResponse(reply.complete(messages))

    return routes


def conversation(state: ServerState, body: ChatBody) -> Conversation:
    """What a request asks for. Raises ApiError 400, and ParameterError."""
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    text = text_schema(body)
    policy = tool_policy(chat_tools(tools), body.tool_choice, parallel=body.parallel_tool_calls, text=text)
    return Conversation(
        messages=template_messages(body.messages),
        tools=policy.tools,
        variables=template_variables(body),
        effort=body.reasoning_effort,
        params=chat_sampling(body, state.sampling),
        answers=body.n or 1,
        max_calls=policy.max_calls,
        structure=policy.structure,
    )


class ChatReply:
    """What a chat completion answers, in one object or in chunks."""

    def __init__(self, state: ServerState, body: ChatBody, answers: Answers) -> None:
        self._state = state
        self._body = body
        self._answers = answers
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def complete(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, message) for index, message in enumerate(messages)],
            "usage": self._usage(),
        }

    def _choice(self, index: int, answer: Message) -> dict[str, Any]:
        calls = [
            _call({"id": _call_id(), "type": "function"}, name=call.name, arguments=call.arguments)
            for call in answer.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if calls:
            message["content"] = answer.content or None
            message["tool_calls"] = calls
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs) if self._body.logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks: each choice's role, what it says, why it ended; then the usage if it was asked for.

        Every delta has a `content`, since there are clients that break where it is missing. The role waits
        for what is said first: there are clients that time the first chunk, and take it for the first token.
        """
        silent = set(range(len(self._answers.turns)))
        async for piece in self._answers.pieces():
            if piece.index in silent:
                silent.remove(piece.index)
                yield self._chunk(piece.index, {"role": "assistant", "content": ""})
            for chunk in self._chunks(piece):
                yield chunk
        if self._body.wants_usage_in_stream:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        deltas = [delta for event in piece.events if (delta := _delta(event)) is not None]
        if self._body.logprobs and piece.logprobs and not deltas:
            deltas = [{"content": ""}]  # a token whose text is held back
        chunks = [self._chunk(piece.index, delta) for delta in deltas]
        if self._body.logprobs and piece.logprobs:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(piece.logprobs)
        if piece.finish_reason is not None:
            chunks.append(self._chunk(piece.index, {}, piece.finish_reason))
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._state.tokenizer, entries)

    def _usage(self) -> dict[str, Any]:
        answers = self._answers
        return usage(
            answers.prompt_tokens,
            answers.completion_tokens,
            cached_tokens=answers.cached_tokens,
            reasoning_tokens=answers.reasoning_tokens,
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._state.model_name}


def _delta(event: Event) -> dict[str, Any] | None:
    """An event as a chunk's delta. A call's first chunk has its id and name, the others arguments alone."""
    match event:
        case Reasoning(text):
            return {"content": "", "reasoning": text}
        case Content(text):
            return {"content": text}
        case CallStart(index, name):
            head = {"index": index, "id": _call_id(), "type": "function"}
            return {"content": "", "tool_calls": [_call(head, name=name, arguments="")]}
        case CallArguments(index, text):
            return {"content": "", "tool_calls": [_call({"index": index}, arguments=text)]}
        case CallEnd():
            return None


def _call(head: dict[str, Any], **function: str) -> dict[str, Any]:
    return {**head, "function": function}


def _call_id() -> str:
    """Ids of our own: those that the model writes begin anew with every turn."""
    return f"call_{secrets.token_hex(12)}"
