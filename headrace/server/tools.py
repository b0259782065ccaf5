"""Which tools a model may call, must call, and how often: one policy for all protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.server.errors import bad_request


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """`tools` are shown to the model, as templates read them; `max_calls` of its calls pass (None: all)."""

    tools: Sequence[Mapping[str, Any]]
    max_calls: int | None


def tool_policy(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, *, parallel: bool | None
) -> ToolPolicy:
    """The policy for a `tool_choice` in OpenAI's form.

    With "none" the model is not even shown the tools: nothing else would keep it from calling one.
    Raises ApiError 400 for a choice that cannot be kept.
    """
    most = 1 if parallel is False else None
    if choice == "none" or not tools:
        wanted = choice not in (None, "none", "auto")
        if wanted and choice != "none":
            raise bad_request("tool_choice: wants a call, but there are no tools", param="tool_choice")
        return ToolPolicy((), 0)
    if choice in (None, "auto"):
        return ToolPolicy(tools, most)
    raise bad_request(
        'tool_choice: only "auto" and "none" can be kept by this server; "required" and named tools cannot',
        param="tool_choice",
    )
