"""Which tools a model may call, must call, and how often, and the form of its answer, for all protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.server.errors import bad_request
from headrace.server.structure import CallSchema, Structure, TextSchema

Tool = Mapping[str, Any]

_ANYTHING: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Place:
    """The fields of a request that a tool's name and the schema of its arguments came in."""

    name: str
    schema: str


Placed = tuple[Tool, Place]


def chat_tools(tools: Sequence[Tool]) -> list[Placed]:
    """Tools where chat has them."""
    where = [f"tools[{number}].function" for number in range(len(tools))]
    places = [Place(f"{each}.name", f"{each}.parameters") for each in where]
    return list(zip(tools, places, strict=True))


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """`tools` are shown to the model, as templates read them; `max_calls` of its calls pass (None: all).

    `structure` is what must be enforced while the answer is made.
    """

    tools: Sequence[Tool]
    max_calls: int | None
    structure: Structure | None = None


def tool_policy(
    placed: Sequence[Placed],
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None,
    text: TextSchema | None = None,
) -> ToolPolicy:
    """The policy for tools, each with where it stood, and a `tool_choice` in OpenAI's form, and for words of
    the form `text`.

    With "none" the model is not even shown the tools: nothing else would keep it from calling one. "required"
    and a named tool are enforced, and so are the schemas of strict tools.
    Raises ApiError 400 for a choice that cannot be kept, or a tool that is none.
    """
    tools = [tool for tool, _ in placed]
    for tool, place in placed:
        _check(tool["function"], place)
    forced = _forced(tools, choice)
    if choice == "none" or not tools:
        return ToolPolicy((), 0, None if text is None else Structure(text=text))
    single = parallel is False or isinstance(choice, Mapping)
    calls = [_schema(tool, place, always=bool(forced)) for tool, place in placed]
    structure = None
    if forced:
        wanted = [call for call in calls if call.name in forced]
        structure = Structure(calls=wanted, must_call=True, single=single)
    elif text is not None or any(_is_strict(tool) for tool in tools):
        structure = Structure(text=text, calls=calls, single=single)
    return ToolPolicy(tools, 1 if single else None, structure)


def _forced(tools: Sequence[Tool], choice: str | Mapping[str, Any] | None) -> frozenset[str]:
    """The names of the tools of which one must be called; none for a choice that is the model's."""
    names = frozenset(_name(tool) for tool in tools)
    if choice in (None, "none", "auto"):
        return frozenset()
    if choice == "required":
        if not names:
            raise bad_request("tool_choice: requires a call, but there are no tools", param="tool_choice")
        return names
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_request(
            'tool_choice: must be "none", "auto", "required", or an object that names one of the tools',
            param="tool_choice",
        )
    if name not in names:
        raise bad_request(f"tool_choice: there is no tool {name[:100]!r}", param="tool_choice")
    return frozenset({name})


def _check(function: Mapping[str, Any], place: Place) -> None:
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request(f"{place.name}: must be the name of a tool", param=place.name)
    if not isinstance(function.get("parameters"), Mapping | None):
        raise bad_request(f"{place.schema}: must be a JSON schema", param=place.schema)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _is_strict(tool: Tool) -> bool:
    return tool["function"].get("strict") is True


def _schema(tool: Tool, place: Place, *, always: bool) -> CallSchema:
    """What a call of the tool must look like: its schema if it is strict or `always`, else any object."""
    strict = _is_strict(tool)
    schema = tool["function"].get("parameters") if always or strict else None
    return CallSchema(_name(tool), schema or _ANYTHING, place.schema, strict)
