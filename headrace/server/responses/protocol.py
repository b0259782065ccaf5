"""The body of `POST /v1/responses`, and the conversation that it stands for.

The input is a list of items, in which a turn is spread over several: thoughts, words and each call are items
of their own, and so are the results. They are gathered into one message for each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from headrace.server.errors import bad_request
from headrace.server.json_text import parsed
from headrace.server.protocol import Body, ResponseFormat, warn_once
from headrace.server.responses.tools import Item, shown_name

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SYSTEM_ROLES = {"developer": "system"}


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class TextOptions(Body):
    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    tools: list[Item] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    user: str | None = None
    background: bool | None = None


def template_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The conversation as templates read it. Raises ApiError 400 for what cannot be read."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        _add(messages, item, f"input[{number}]")
    if not messages:
        raise bad_request("input: is empty; give at least one message", param="input")
    return messages


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            if thoughts := _thoughts(item):
                turn = _turn(messages, after_calls=False)
                turn["reasoning"] = turn["reasoning_content"] = turn.get("reasoning", "") + thoughts
        case "function_call" | "custom_tool_call" as kind:
            _add_call(messages, item, where, custom=kind == "custom_tool_call")
        case "function_call_output" | "custom_tool_call_output":
            content = _text(item.get("output"), f"{where}.output", lenient=True)
            call = item.get("call_id")
            if not isinstance(call, str):
                where += ".call_id"
                raise bad_request(f"{where}: a tool's result needs the id of its call", param=where)
            messages.append({"role": "tool", "tool_call_id": call, "content": content})
        case "item_reference":
            raise bad_request(
                f"{where}: this server stores no items; send the item itself (with store: false)",
                param=where,
            )
        case other:
            warn_once(f"Leaving out an input item of type {str(other)[:50]}, which no template can show")


def _add_message(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise bad_request(
            f"{where}.role: must be system, developer, user or assistant", param=f"{where}.role"
        )
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        turn = _turn(messages, after_calls=False)
        turn["content"] += text
    else:
        messages.append({"role": _SYSTEM_ROLES.get(role, role), "content": text})


def _add_call(messages: list[dict[str, Any]], item: Item, where: str, *, custom: bool) -> None:
    if not isinstance(item.get("name"), str):
        raise bad_request(f"{where}.name: must be the name of a tool", param=f"{where}.name")
    arguments = {"input": item.get("input") or ""} if custom else _arguments(item.get("arguments"))
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": shown_name(item), "arguments": arguments},
    }
    _turn(messages, after_calls=True).setdefault("tool_calls", []).append(call)


def _turn(messages: list[dict[str, Any]], *, after_calls: bool) -> dict[str, Any]:
    """The assistant's turn under way, or a new one. Thoughts and words after calls begin a new turn."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (last.get("tool_calls") and not after_calls):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _thoughts(item: Item) -> str:
    """Thoughts as they were, or else their summary."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return ""


def _arguments(arguments: Any) -> Any:
    """A call's arguments as an object; a string that does not parse was cut off by a limit and stays."""
    try:
        return parsed(arguments) if isinstance(arguments, str) else arguments or {}
    except ValueError:
        return arguments or {}


def _text(content: Any, where: str, *, lenient: bool = False) -> str:
    """The text of a string or a list of parts; `lenient` marks the place of what is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise bad_request(f"{where}: must be a string or a list of parts", param=where)
    return "\n".join(
        _part(part, f"{where}[{number}]", lenient=lenient) for number, part in enumerate(content)
    )


def _part(part: Any, where: str, *, lenient: bool) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if isinstance(text, str):
        return text
    if lenient:
        return f"[{kind} left out]"
    raise bad_request(
        f"{where}.type: {kind!r} is not supported; this model reads text parts only.", param=f"{where}.type"
    )
