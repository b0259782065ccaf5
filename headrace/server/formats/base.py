"""What a chat format is to everyone else, and the choice of one."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.model.tokenizer import Tokenizer
from headrace.server.formats.events import Event
from headrace.server.formats.hermes import HermesFormat
from headrace.server.formats.machine import Lane, Marks
from headrace.server.formats.north import NorthFormat
from headrace.server.formats.plain import PlainFormat


class OutputParser(Protocol):
    """Reads one answer as it is made. How the text is split into pieces makes no difference."""

    @property
    def lane(self) -> Lane:
        """Where the next character belongs, as far as is known."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class ChatFormat(Protocol):
    """One model family's way to write turns. Prompts are rendered by the checkpoint's own template.

    `keeps_markers`: the parser needs special tokens as text.
    """

    name: str
    keeps_markers: bool
    marks: Marks | None
    """Where constrained decoding finds the blocks of an answer; None where it cannot be done."""

    @staticmethod
    def fits(tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer and its template are of this format."""

    def variables(self, effort: str) -> dict[str, Any]:
        """How the template is told a reasoning effort; "none" switches reasoning off."""

    def parser(self, prompt: str) -> OutputParser:
        """A parser that starts where the rendered prompt leaves off."""


_FORMATS: tuple[ChatFormat, ...] = (NorthFormat(), HermesFormat(), PlainFormat())


def choose_format(tokenizer: Tokenizer) -> ChatFormat:
    """The first format that fits, from the most particular to the plain one, which always does."""
    return next(each for each in _FORMATS if each.fits(tokenizer))
