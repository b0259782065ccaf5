"""The body of `POST /v1/messages`, and the conversation that it stands for.

Content is a string or a list of blocks. Tool calls and results are blocks too: calls in the assistant's
messages, results in the user's, before what the user says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from headrace.server.errors import bad_request
from headrace.server.protocol import Body, warn_once
from headrace.server.structure import TextSchema
from headrace.server.tools import Place, Placed

Blocks = list[dict[str, Any]]

# Claude Code puts this line, different in every request, before its instructions: nothing of a prompt that
# begins with it could be used again.
_BILLING = "x-anthropic-billing-header:"


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class AnthropicTool(Body):
    """A tool with a schema is the client's; any other would be run by Anthropic's servers.

    One with `defer_loading` is not shown to the model before a tool's result refers to it.
    """

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Thinking(Body):
    type: str


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | Blocks | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


def effort(body: CountBody) -> str:
    """The reasoning effort: none unless the client asks for thinking, as the protocol has it."""
    if body.thinking is None or body.thinking.type == "disabled":
        return "none"
    wanted = (body.output_config or {}).get("effort")
    return wanted if isinstance(wanted, str) and wanted else "high"


def text_schema(body: CountBody) -> TextSchema | None:
    """The schema that the answer's words must keep to, by `output_config.format`. Raises ApiError 400."""
    form = (body.output_config or {}).get("format")
    if form is None:
        return None
    where = "output_config.format"
    schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise bad_request(f'{where}: must be {{"type": "json_schema", "schema": {{...}}}}', param=where)
    return TextSchema(schema, f"{where}.schema", strict=True)


def template_tools(body: CountBody) -> list[Placed]:
    """The tools in OpenAI's form, which templates read, with where they stood; those deferred stay out."""
    tools: list[Placed] = []
    for number, tool in enumerate(body.tools or ()):
        if tool.defer_loading:
            continue
        if tool.input_schema is None:
            warn_once(f"Leaving out the tool {tool.name[:100]}: it would run on Anthropic's servers")
            continue
        function: dict[str, Any] = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        if tool.strict is not None:
            function["strict"] = tool.strict
        place = Place(f"tools[{number}].name", f"tools[{number}].input_schema")
        tools.append(({"type": "function", "function": function}, place))
    return tools


def openai_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """`tool_choice` as OpenAI has it, and whether calls may be parallel. Raises ApiError 400."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, parallel
        case "any":
            return "required", parallel
        case "tool":
            if not isinstance(choice.get("name"), str):
                raise bad_request("tool_choice.name: must be the name of a tool", param="tool_choice.name")
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    raise bad_request('tool_choice.type: must be "auto", "any", "tool" or "none"', param="tool_choice.type")


def template_messages(body: CountBody) -> list[dict[str, Any]]:
    """The conversation as templates read it. Raises ApiError 400 for content that is not text."""
    system = "\n\n".join(_system_texts(body.system))
    messages = [{"role": "system", "content": system}] if system else []
    tools = {tool.name: tool for tool in body.tools or ()}
    for number, message in enumerate(body.messages):
        where = f"messages[{number}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _user(message.role, message.content, where, tools)
    return messages


def _system_texts(system: str | Blocks | None) -> Iterator[str]:
    """The parts of the system prompt, without the billing line, which is a part or the first line of one."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    for number, block in enumerate(blocks):
        text = _text(block, f"system[{number}]")
        if text.startswith(_BILLING):
            text = text.partition("\n")[2]
        if text:
            yield text


def _assistant(blocks: Blocks, where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    thoughts, texts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # another server's secret
            case "tool_use":
                calls.append(_call(block, f"{where}[{number}]"))
            case _:
                texts.append(_text(block, f"{where}[{number}]"))
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = block.get("name")
    if not isinstance(name, str):
        raise bad_request(f"{where}.name: must be the name of a tool", param=f"{where}.name")
    function = {"name": name, "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


def _user(role: str, blocks: Blocks, where: str, tools: Mapping[str, AnthropicTool]) -> list[dict[str, Any]]:
    """Results as messages of their own, then what the user says, the blocks of which are lines."""
    results, texts = [], []
    for number, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = _result(block.get("content"), f"{where}[{number}].content", tools)
            call = _call_of(block, f"{where}[{number}].tool_use_id")
            results.append({"role": "tool", "tool_call_id": call, "content": content})
        else:
            texts.append(_text(block, f"{where}[{number}]"))
    said = [{"role": role, "content": "\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _call_of(block: Mapping[str, Any], where: str) -> str:
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        raise bad_request(f"{where}: a tool's result needs the id of its call", param=where)
    return call


def _result(content: Any, where: str, tools: Mapping[str, AnthropicTool]) -> str:
    """The text of a tool's result. An image in it must not end the conversation: its place is marked.

    A reference to a tool becomes the tool's definition: shown here, and not in the list at the head of the
    prompt, it leaves all that stands before it as it was, and in the prefix cache.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(block, Mapping) for block in content):
        raise bad_request(f"{where}: must be a string or a list of blocks", param=where)
    return "\n".join(_result_block(block, where, tools) for block in content)


def _result_block(block: Mapping[str, Any], where: str, tools: Mapping[str, AnthropicTool]) -> str:
    match block.get("type"):
        case "text":
            return _text(block, where)
        case "tool_reference":
            tool = tools.get(str(block.get("tool_name")))
            if tool is not None and tool.input_schema is not None:
                shown = {"description": tool.description, "name": tool.name, "parameters": tool.input_schema}
                return f"<function>{json.dumps(shown, ensure_ascii=False)}</function>"
    return f"[{block.get('type')} left out]"


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise bad_request(
            f"{where}.type: {block.get('type')!r} is not supported; this model reads text blocks only "
            '({"type": "text", "text": "..."}).',
            param=f"{where}.type",
        )
    return str(block["text"])
