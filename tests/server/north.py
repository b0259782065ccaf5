"""Answers as North writes them, and what clients make of the streams that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.model import markers


def call(name: str, arguments: Mapping[str, Any], number: int = 0) -> str:
    fields = {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
    return json.dumps(fields, ensure_ascii=False)


def action(*calls: str) -> str:
    return markers.START_ACTION + "[\n    " + ",\n    ".join(calls) + "\n]" + markers.END_ACTION


def thinks(thoughts: str, *rest: str) -> str:
    return thoughts + markers.END_THINKING + "".join(rest)


def text(words: str) -> str:
    return markers.START_TEXT + words + markers.END_TEXT


def joined(chunks: Iterable[Any]) -> dict[str, Any]:
    """A chat stream's one choice as a whole message, put together as strict clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert message["finish_reason"] is None, "a chunk after the last one"
            delta = choice["delta"]
            if choice["finish_reason"] is None:
                assert isinstance(delta["content"], str)
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(message["calls"]):
                    assert set(part) == {"index", "id", "type", "function"}
                    assert part["function"]["arguments"] == ""
                    message["calls"].append({"id": part["id"], **part["function"]})
                else:
                    assert set(part) == {"index", "function"}
                    assert part["function"]["arguments"]
                    message["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message
