"""A response's items, and the events that tell of them as they grow.

One item is open at a time. Every item has an event when it is added and one when it is done, and between
them the deltas of its text or arguments; the same happens to the part of which a message consists.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from headrace.server.formats import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from headrace.server.json_text import parsed

Wire = dict[str, Any]


class Items:
    """The items so far, in `output`.

    `names` has, by the name that the model calls a tool, what the wire calls it, and the type of its calls:
    those of type custom_tool_call go out as free text.
    """

    def __init__(self, names: Mapping[str, Wire] | None = None) -> None:
        self.output: list[Wire] = []
        self._names = names or {}
        self._open: Wire | None = None
        self._text: list[str] = []

    def take(self, event: Event) -> list[Wire]:
        """The wire's events for the next event of the answer."""
        match event:
            case Reasoning(text):
                return [*self._begin("reasoning"), self._delta("reasoning_text", text)]
            case Content(text):
                return [*self._begin("message"), self._delta("output_text", text)]
            case CallStart(_, name):
                tool = {"type": "function_call", "name": name, **self._names.get(name, {})}
                return [*self.close(), *self._begin(tool.pop("type"), tool)]
            case CallArguments(_, text):
                if self._kind == "custom_tool_call":  # the text is inside JSON that is not whole yet
                    self._text.append(text)
                    return []
                return [self._delta("function_call_arguments", text)]
            case CallEnd():
                return self.close()

    def close(self, *, complete: bool = True) -> list[Wire]:
        """Finish the open item, if there is one."""
        if self._open is None:
            return []
        item, text = self._open, "".join(self._text)
        events = self._finish(item, text)
        if "status" in item:
            item["status"] = "completed" if complete else "incomplete"
        events.append(self._event("response.output_item.done", item=_copy(item)))
        self._open, self._text = None, []
        return events

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else str(self._open["type"])

    def _begin(self, kind: str, tool: Wire | None = None) -> list[Wire]:
        """Open an item, unless one of this kind is open and the kind can go on."""
        if self._kind == kind:
            return []
        events = self.close()
        self._open = item = _new_item(kind, tool or {})
        self.output.append(item)
        events.append(self._event("response.output_item.added", item=_copy(item)))
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            events.append(self._part_event("response.content_part.added", part=part))
        return events

    def _delta(self, kind: str, text: str) -> Wire:
        self._text.append(text)
        if kind == "function_call_arguments":
            return self._item_event(f"response.{kind}.delta", delta=text)
        extra: Wire = {"logprobs": []} if kind == "output_text" else {}
        return self._part_event(f"response.{kind}.delta", delta=text, **extra)

    def _finish(self, item: Wire, text: str) -> list[Wire]:
        """Put the whole text into the item; the events that say so."""
        match item["type"]:
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                return [self._part_event("response.reasoning_text.done", text=text)]
            case "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
                item["content"] = [part]
                return [
                    self._part_event("response.output_text.done", text=text, logprobs=[]),
                    self._part_event("response.content_part.done", part=part),
                ]
            case "function_call":
                item["arguments"] = text
                name = item["name"]
                return [self._item_event("response.function_call_arguments.done", arguments=text, name=name)]
        item["input"] = _free_text(text)
        return [
            self._item_event("response.custom_tool_call_input.delta", delta=item["input"]),
            self._item_event("response.custom_tool_call_input.done", input=item["input"]),
        ]

    def _part_event(self, kind: str, **fields: Any) -> Wire:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Wire:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], **fields)

    def _event(self, kind: str, **fields: Any) -> Wire:
        return {"type": kind, "output_index": len(self.output) - 1, **fields}


def _new_item(kind: str, tool: Wire) -> Wire:
    token = secrets.token_hex(12)
    match kind:
        case "reasoning":
            return {
                "type": kind,
                "id": f"rs_{token}",
                "summary": [],
                "content": [],
                "encrypted_content": None,
            }
        case "message":
            head = {"type": kind, "id": f"msg_{token}", "status": "in_progress"}
            return {**head, "role": "assistant", "content": []}
        case "function_call":
            head = {"type": kind, "id": f"fc_{token}", "status": "in_progress"}
            return {**head, "call_id": f"call_{token}", **tool, "arguments": ""}
    head = {"type": kind, "id": f"ctc_{token}", "status": "in_progress"}
    return {**head, "call_id": f"call_{token}", **tool, "input": ""}


def _free_text(arguments: str) -> str:
    """The one argument of a custom tool; the arguments as they are, where a limit cut them off."""
    try:
        value = parsed(arguments)
    except ValueError:
        return arguments
    return str(value["input"]) if isinstance(value, dict) and "input" in value else arguments


def _copy(item: Wire) -> Wire:
    """The item as it is now: events are written after it may have changed."""
    return dict(item)
