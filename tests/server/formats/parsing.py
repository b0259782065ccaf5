"""Answers put through a parser, whole or in pieces, and what came out put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.server.formats import CallArguments, CallEnd, CallStart, Content, Event, OutputParser, Reasoning


@dataclass
class Call:
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Parsed:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def together(events: Sequence[Event]) -> Parsed:
    """Everything that `events` say. AssertionError for one that does not follow from those before it."""
    parsed = Parsed()
    for event in events:
        match event:
            case Reasoning(text):
                assert text
                parsed.reasoning += text
            case Content(text):
                assert text
                parsed.content += text
            case CallStart(index, name):
                assert index == len(parsed.calls)
                parsed.calls.append(Call(name))
            case CallArguments(index, text):
                assert text
                assert index == len(parsed.calls) - 1
                assert not parsed.calls[index].complete
                parsed.calls[index].arguments += text
            case CallEnd(index):
                assert index == len(parsed.calls) - 1
                parsed.calls[index].complete = True
    return parsed


def parse(parser: OutputParser, pieces: Sequence[str]) -> Parsed:
    events = [event for piece in pieces for event in parser.push(piece)]
    return together([*events, *parser.finish()])


def split(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` cut at every place in `cuts`, modulo its length."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
