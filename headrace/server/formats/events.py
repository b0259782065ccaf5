"""What a model's answer consists of, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The answer in words."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls are numbered from 0 in the order in which their names appear."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: JSON text, never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete. One that the token limit cut off has no end."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


def append(events: list[Event], event: Event) -> None:
    """Add `event`, joining its text to that of a last event of the same kind."""
    last = events[-1] if events else None
    match last, event:
        case Reasoning(before), Reasoning(text):
            events[-1] = Reasoning(before + text)
        case Content(before), Content(text):
            events[-1] = Content(before + text)
        case CallArguments(index, before), CallArguments(same, text) if index == same:
            events[-1] = CallArguments(index, before + text)
        case _:
            events.append(event)
