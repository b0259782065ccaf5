"""For models without a format of tools or reasoning: all that they write is the answer."""

from __future__ import annotations

from typing import Any

from headrace.model.tokenizer import Tokenizer
from headrace.server.formats.events import Content, Event
from headrace.server.formats.machine import Lane, Marks


class PlainParser:
    """Text in, the same text out."""

    lane = Lane.ANSWER

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class PlainFormat:
    """See the module."""

    name = "plain"
    keeps_markers = False
    marks: Marks | None = Marks()

    @staticmethod
    def fits(tokenizer: Tokenizer) -> bool:
        return True

    def variables(self, effort: str) -> dict[str, Any]:
        return {"reasoning_effort": effort}

    def parser(self, prompt: str) -> PlainParser:
        return PlainParser()
