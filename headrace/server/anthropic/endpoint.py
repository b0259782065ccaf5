"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.anthropic import protocol
from headrace.server.anthropic.protocol import CountBody, MessagesBody
from headrace.server.anthropic.reply import DIALECT, MessageReply
from headrace.server.conversation import Conversation, answer, render
from headrace.server.description import ANTHROPIC_PATH
from headrace.server.disconnect import unless_gone
from headrace.server.sampling import sampling_params
from headrace.server.state import ServerState
from headrace.server.streaming import EventStream
from headrace.server.tools import tool_policy


def router(state: ServerState) -> APIRouter:
    """The endpoints, serving `state`."""
    routes = APIRouter()

    @routes.post(ANTHROPIC_PATH, response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response:
        _check_model(state, body.model)
        answers = await answer(state, conversation(state, body))
        reply = MessageReply(body.model or state.model_name, answers)
        if body.stream:
            return EventStream(
                reply.events(), answers.generation, dialect=DIALECT, keep_alive=state.keep_alive
            )
        [message] = await unless_gone(request.receive, answers.collect())
        return JSONResponse(reply.complete(message))

    @routes.post(f"{ANTHROPIC_PATH}/count_tokens", response_model=None)
    async def count_tokens(body: CountBody) -> dict[str, int]:
        _check_model(state, body.model)
        _, tokens = await asyncio.to_thread(render, state, conversation(state, body))
        return {"input_tokens": len(tokens)}

    return routes


def _check_model(state: ServerState, name: str | None) -> None:
    """Claude Code names small models of Anthropic's for its side tasks: there is one model for all."""
    if name is not None and not name.startswith("claude-"):
        state.check_model(name)


def conversation(state: ServerState, body: CountBody) -> Conversation:
    """What a request asks for. Raises ApiError 400, and ParameterError."""
    choice, parallel = protocol.openai_choice(body.tool_choice)
    text = protocol.text_schema(body)
    policy = tool_policy(protocol.template_tools(body), choice, parallel=parallel, text=text)
    given: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        given = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        given["stop"] = body.stop_sequences
    return Conversation(
        messages=protocol.template_messages(body),
        tools=policy.tools,
        effort=protocol.effort(body),
        params=sampling_params(given, state.sampling, {"stop": "stop_sequences"}),
        max_calls=policy.max_calls,
        structure=policy.structure,
    )
