"""The tools of a response, under the names that the model reads.

A namespace is a tool that holds tools: Codex sends those of its agents and of MCP servers so. Templates know
no such thing, so they get NAMESPACE__NAME, and a call of it goes out with its namespace and its name apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.server.errors import bad_request
from headrace.server.protocol import warn_once
from headrace.server.tools import Place, Placed

Item = dict[str, Any]

_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def shown_name(item: Mapping[str, Any]) -> str:
    """The name of a tool, or of a call, as the model reads it."""
    name, namespace = str(item.get("name")), item.get("namespace")
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def template_tools(tools: Iterable[Item] | None) -> list[Placed]:
    """The tools in chat's form, which templates read, each with where it stood. A free text becomes the one
    argument of a function."""
    result: list[Placed] = []
    for tool, where in _tools(tools, "tools"):
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise bad_request(f"{where}.name: must be the name of a tool", param=f"{where}.name")
        function = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        schema = _CUSTOM_SCHEMA if tool["type"] == "custom" else tool.get("parameters")
        function = {"name": shown_name(tool), **function}
        function["parameters"] = schema or {"type": "object", "properties": {}}
        place = Place(f"{where}.name", f"{where}.parameters")
        result.append(({"type": "function", "function": function}, place))
    return result


def wire_names(tools: Iterable[Item] | None) -> dict[str, Item]:
    """What a call's item says of its tool (type, name, namespace), by the name that the model reads."""
    return {
        shown_name(tool): {
            "type": "custom_tool_call" if tool["type"] == "custom" else "function_call",
            **{key: tool[key] for key in ("name", "namespace") if key in tool},
        }
        for tool, _ in _tools(tools, "tools")
    }


def chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """`tool_choice` as chat has it: there a named function is an object inside the object."""
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        name = shown_name(choice) if isinstance(choice.get("name"), str) else None
        return {"type": "function", "function": {"name": name}}
    return choice if choice is None or isinstance(choice, str) else dict(choice)


def _tools(tools: Any, where: str, namespace: str | None = None) -> Iterator[tuple[Item, str]]:
    """The client's tools, those in namespaces with theirs, each with where it stands."""
    for number, tool in enumerate(tools or ()):
        kind, inside = tool.get("type"), f"{where}[{number}]"
        if kind in ("function", "custom"):
            yield (tool if namespace is None else {**tool, "namespace": namespace}), inside
        elif kind == "namespace" and namespace is None:
            yield from _tools(_members(tool, inside), f"{inside}.tools", str(tool.get("name") or ""))
        else:
            warn_once(f"Leaving out a tool of type {str(kind)[:50]}: it would run on OpenAI's servers")


def _members(tool: Item, where: str) -> list[Item]:
    members = tool.get("tools")
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise bad_request(f"{where}.tools: must be a list of tools", param=f"{where}.tools")
    return members
