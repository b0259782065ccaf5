"""From the messages of a request to what a chat template reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.server.errors import bad_request
from headrace.server.json_text import parsed
from headrace.server.protocol import ChatBody, Message, ResponseFormat, ToolCall
from headrace.server.structure import TextSchema

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, one kind of system role, arguments as objects.

    `developer` is OpenAI's newer name of the system role, and templates do not know it. Reasoning is given
    under both names in use. Raises ApiError 400 for content that is not text.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _text(message.content, where)}
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    if message.role == "tool" and message.tool_call_id is None:
        where += ".tool_call_id"
        raise bad_request(f"{where}: a tool's result needs the id of its call", param=where)
    if message.tool_calls:
        result["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            result[key] = value
    return result


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """The text of a message's content; the texts of several parts are lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise bad_request(
            f"{where}.type: {kind!r} is not supported; this model reads text parts only "
            '({"type": "text", "text": "..."}).',
            param=f"{where}.type",
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        param = f"{where}.{_TEXT_PARTS[kind]}"
        raise bad_request(f"{param}: Input should be a valid string", param=param)
    return text


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    result: dict[str, Any] = {"type": "function", "function": function}
    return result if call.id is None else {"id": call.id, **result}


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """A call's arguments as an object: templates write them as JSON, and a string would be encoded twice.

    What does not parse stays as it is: it is a call of the model's own that a limit cut off, and a
    conversation must be able to go on after that.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            return parsed(arguments)
        except ValueError:
            return arguments
    return arguments


def template_variables(body: ChatBody) -> dict[str, Any]:
    """The variables of `chat_template_kwargs`. Raises ApiError 400 for one that is a field of its own."""
    for name in ("messages", "tools"):
        if name in (body.chat_template_kwargs or {}):
            where = f"chat_template_kwargs.{name}"
            raise bad_request(f"{where}: is a field of its own; send it as {name}", param=where)
    return dict(body.chat_template_kwargs or {})


def text_schema(body: ChatBody) -> TextSchema | None:
    """The schema that the answer's words must keep to, by `response_format`. Raises ApiError 400."""
    form = body.response_format
    return None if form is None else schema_of(form, form.json_schema, "response_format")


def schema_of(form: ResponseFormat, described: dict[str, Any] | None, param: str) -> TextSchema | None:
    """The schema that a format asks for; `described` holds it where the type says that there is one."""
    if form.type == "text":
        return None
    if form.type == "json_object":
        return TextSchema({"type": "object"}, param)
    if form.type != "json_schema":
        where = f"{param}.type"
        raise bad_request(f'{where}: must be "text", "json_object" or "json_schema"', param=where)
    schema = (described or {}).get("schema")
    if not isinstance(schema, dict):
        where = f"{param}.json_schema.schema" if param == "response_format" else f"{param}.schema"
        raise bad_request(f"{where}: must be a JSON schema", param=where)
    strict = (described or {}).get("strict") if form.strict is None else form.strict
    return TextSchema(
        schema,
        f"{param}.json_schema.schema" if param == "response_format" else f"{param}.schema",
        strict is True,
    )
