"""What clients send: the bodies of the OpenAI endpoints.

A known field of a wrong type is refused, and numbers in strings are wrong types; null is the same as absent.
An unknown field is tolerated, since clients send fields of other servers, and logged once.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

log = logging.getLogger(__name__)

_MAX_NOTED = 200  # a bound on what clients can make this process remember
_noted: set[str] = set()


class Body(BaseModel):
    """Base of all that is read from a client."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    def model_post_init(self, context: Any, /) -> None:
        for name in self.model_extra or ():
            warn_once(f"Ignoring the unknown request field {type(self).__name__}.{name[:100]}")


def warn_once(message: str) -> None:
    """Log what clients should know but need not be refused for, the first time only."""
    if message not in _noted and len(_noted) < _MAX_NOTED:
        _noted.add(message)
        log.warning("%s (said once).", message)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Body):
    """The fields that chat and text completions share. top_k, min_p, repetition_penalty, stop_token_ids and
    ignore_eos are not OpenAI's; their names and meanings are those of vLLM.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def wants_usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(Body):
    """One message of a conversation, in any of the forms that clients write it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(Body):
    """A tool that the model may call. All of it, known or not, goes to the chat template."""

    type: Literal["function"]
    function: dict[str, Any]


class ResponseFormat(Body):
    """In chat the schema stands inside `json_schema`, in responses beside the type."""

    type: str
    json_schema: dict[str, Any] | None = None
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. A prompt is text or token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
