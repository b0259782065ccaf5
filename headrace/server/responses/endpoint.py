"""`POST /v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.conversation import Conversation, answer
from headrace.server.disconnect import unless_gone
from headrace.server.errors import bad_request
from headrace.server.messages import schema_of
from headrace.server.responses import protocol
from headrace.server.responses.protocol import ResponsesBody
from headrace.server.responses.reply import ResponseReply
from headrace.server.responses.tools import chat_choice, template_tools
from headrace.server.sampling import sampling_params
from headrace.server.state import ServerState
from headrace.server.streaming import EventStream
from headrace.server.tools import tool_policy


def router(state: ServerState) -> APIRouter:
    """The endpoint, serving `state`."""
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        state.check_model(body.model)
        answers = await answer(state, conversation(state, body))
        reply = ResponseReply(state.model_name, body, answers)
        if body.stream:
            return EventStream(
                reply.events(), answers.generation, dialect=reply.dialect, keep_alive=state.keep_alive
            )
        [message] = await unless_gone(request.receive, answers.collect())
        return JSONResponse(reply.complete(message))

    return routes


def conversation(state: ServerState, body: ResponsesBody) -> Conversation:
    """What a request asks for. Raises ApiError 400, and ParameterError."""
    _refuse_unsupported(body)
    tools = template_tools(body.tools)
    choice = chat_choice(body.tool_choice)
    form = body.text.format if body.text else None
    text = None if form is None else schema_of(form, {"schema": form.schema_}, "text.format")
    policy = tool_policy(tools, choice, parallel=body.parallel_tool_calls, text=text)
    given = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    return Conversation(
        messages=protocol.template_messages(body),
        tools=policy.tools,
        effort=body.reasoning.effort if body.reasoning else None,
        params=sampling_params(given, state.sampling),
        max_calls=policy.max_calls,
        structure=policy.structure,
        param="input",
    )


def _refuse_unsupported(body: ResponsesBody) -> None:
    """Raises ApiError 400 for what would change the answer and cannot be done."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name}: this server stores no responses; send all turns as input", param=name)
    if body.prompt is not None:
        raise bad_request("prompt: this server stores no prompts; send its text as input", param="prompt")
    if body.background:
        raise bad_request("background: is not supported by this server; leave it out", param="background")
