"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine.request import Output
from headrace.model.tokenizer import ChatTemplateError
from headrace.server.disconnect import unless_gone
from headrace.server.errors import bad_request
from headrace.server.generation import Answer, Generation
from headrace.server.logprobs import chat_logprobs
from headrace.server.messages import template_messages, template_variables
from headrace.server.protocol import ChatBody, warn_once
from headrace.server.sampling import chat_sampling, choices
from headrace.server.state import ServerState
from headrace.server.streaming import EventStream
from headrace.server.usage import usage


def router(state: ServerState) -> APIRouter:
    """The endpoint, serving `state`."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        state.check_model(body.model)
        _refuse_unsupported(body)
        params = choices(chat_sampling(body), body.n)
        # Rendering and tokenizing a long conversation takes long enough to hold up other clients' streams.
        prompt = await asyncio.to_thread(render, state, body)
        generation = state.submit([prompt], params, param="messages")
        reply = ChatReply(state, body, prompt_tokens=len(prompt))
        if body.stream:
            return EventStream(reply.events(generation), generation)
        answers = await unless_gone(request.receive, generation.collect())
        return JSONResponse(reply.complete(answers))

    return routes


def render(state: ServerState, body: ChatBody) -> list[int]:
    """The conversation as the model's prompt, by the checkpoint's own template. Raises ApiError 400."""
    messages = template_messages(body.messages)
    try:
        text = state.tokenizer.render_chat(messages, **template_variables(body))
    except ChatTemplateError as error:
        raise bad_request(f"messages: {error}", param="messages") from error
    return state.encode(text, param="messages", add_special_tokens=False)  # the template writes them


def _refuse_unsupported(body: ChatBody) -> None:
    """Raises ApiError 400 for what would change the answer's form and cannot be done.

    Agents send `tool_choice` as a matter of course and cope with an answer in words, so that is let through.
    """
    if body.tool_choice not in (None, "none", "auto"):
        warn_once("A request wants a tool call by its tool_choice, which is not enforced")
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request(
            f"response_format: type {body.response_format.type[:50]!r} is not supported by this server; "
            "leave it out and ask for the form in a message",
            param="response_format",
        )


class ChatReply:
    """What a chat completion answers, in one object or in chunks."""

    def __init__(self, state: ServerState, body: ChatBody, *, prompt_tokens: int) -> None:
        self._state = state
        self._body = body
        self._prompt_tokens = prompt_tokens
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def complete(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage(self._prompt_tokens, sum(len(answer.token_ids) for answer in answers)),
        }

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs = chat_logprobs(self._state.tokenizer, answer.logprobs) if self._body.logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }

    async def events(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The chunks: each choice's role, what it says, why it ended; then the usage if it was asked for."""
        for index in range(generation.size):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        completion_tokens = 0
        async for index, output in generation.outputs():
            completion_tokens += len(output.token_ids)
            if output.text or (self._body.logprobs and output.logprobs):
                yield self._chunk(index, {"content": output.text}, output)
            if output.finish_reason is not None:
                yield self._chunk(index, {}, finish_reason=output.finish_reason)
        if self._body.wants_usage_in_stream:
            total = usage(self._prompt_tokens, completion_tokens)
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": total}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        output: Output | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs and output is not None:
            logprobs = chat_logprobs(self._state.tokenizer, output.logprobs)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._state.model_name}
