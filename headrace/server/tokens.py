"""`POST /tokenize` and `POST /detokenize`, in the form that vLLM gave them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from headrace.server.conversation import Conversation, render
from headrace.server.errors import bad_request
from headrace.server.messages import template_messages
from headrace.server.protocol import Body, FunctionTool, Message
from headrace.server.state import ServerState


class TokenizeBody(Body):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def router(state: ServerState) -> APIRouter:
    """The endpoints, serving `state`."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        state.check_model(body.model)
        tokens = await asyncio.to_thread(_tokens, state, body)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": state.engine.max_context,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [state.tokenizer.token_text(token) for token in tokens]
        return answer

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        state.check_model(body.model)
        if any(not 0 <= token < state.vocab_size for token in body.tokens):
            raise bad_request(f"tokens: must be ids from 0 to {state.vocab_size - 1}", param="tokens")
        return {"prompt": state.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return routes


def _tokens(state: ServerState, body: TokenizeBody) -> list[int]:
    """Raises ApiError 400 unless there is either a prompt or messages."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: give either a prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return state.encode(body.prompt, param="prompt", add_special_tokens=special)
    assert body.messages is not None
    conversation = Conversation(
        messages=template_messages(body.messages),
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        variables={"add_generation_prompt": body.add_generation_prompt is not False},
    )
    return render(state, conversation)[1]
