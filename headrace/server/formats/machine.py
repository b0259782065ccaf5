"""The state machine that formats with block markers share: which marker opens which lane of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from headrace.server.formats.calls import CallReader
from headrace.server.formats.events import Content, Event, Reasoning, append


class Lane(Enum):
    """Where in an answer the next character belongs."""

    BETWEEN = auto()  # blocks: white space is dropped, anything else begins the answer
    THINKING = auto()
    ANSWER = auto()
    CALLS = auto()


@dataclass(frozen=True, slots=True)
class Marks:
    """The markers around an answer's blocks, each a single token: what closes the thoughts, and the pairs
    around words and calls. Without a pair the words are all of the answer, and calls cannot be, unless they
    stand among the words, each between `call_tags`; these, and what then closes the thoughts, are text of
    any number of tokens.
    """

    end_thinking: str | None = None
    text: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    call_tags: tuple[str, str] | None = None


class LaneParser:
    """Splits an answer into lanes at its markers, which may be split over pieces of text in any way.

    `opens` maps each marker that begins a block to its lane, `closes` each that ends one. A closing marker
    of another lane than the present one is dropped; markers never appear in what comes out. Inside the JSON
    strings of a call a marker is data.
    """

    def __init__(
        self, lane: Lane, *, opens: Mapping[str, Lane], closes: Mapping[str, Lane | None], calls: CallReader
    ) -> None:
        self.lane = lane
        self._opens = opens
        self._closes = closes
        self._markers = (*opens, *closes)
        self._calls = calls
        self._pending = ""  # may begin a marker
        self._space = ""  # between blocks

    def push(self, text: str) -> list[Event]:
        """What `text` adds to the answer."""
        events: list[Event] = []
        text = self._pending + text
        self._pending = ""
        position = 0
        while position < len(text):
            position += self._plain(text, position, events)
            if position < len(text):  # at a "<" that may begin a marker
                taken = self._marker(text, position, events)
                if not taken:
                    self._pending = text[position:]
                    break
                position += taken
        return events

    def finish(self) -> list[Event]:
        """The end of the answer: what looked like the beginning of a marker is text after all.

        A call under way stays without an end: only whoever knows why the answer ended can tell what it is.
        """
        events: list[Event] = []
        pending, self._pending = self._pending, ""
        if self.lane is not Lane.CALLS:
            self._text(pending, events)
        return events

    def _plain(self, text: str, position: int, events: list[Event]) -> int:
        """Take text up to where a marker may begin; how much."""
        if self.lane is Lane.CALLS:
            return self._calls.feed(text[position:] if position else text, events)
        end = text.find("<", position)
        end = len(text) if end < 0 else end
        self._text(text[position:end], events)
        return end - position

    def _marker(self, text: str, position: int, events: list[Event]) -> int:
        """Act on the marker at `position`, or take its "<" as text; 0 if more text must decide."""
        for marker in self._markers:
            if text.startswith(marker, position):
                self._act(marker, events)
                return len(marker)
        rest = text[position:]
        if any(marker.startswith(rest) for marker in self._markers):
            return 0
        if self.lane is Lane.CALLS:
            self._calls.literal("<", events)
        else:
            self._text("<", events)
        return 1

    def _act(self, marker: str, events: list[Event]) -> None:
        opened = self._opens.get(marker)
        if opened is None:
            closed = self._closes[marker]
            if closed not in (None, self.lane):
                return
            opened = Lane.BETWEEN
        if self.lane is Lane.CALLS:
            self._calls.end(events)
        if opened is Lane.CALLS:
            self._calls.begin()
        self.lane = opened
        self._space = ""

    def _text(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self.lane is Lane.THINKING:
            append(events, Reasoning(text))
            return
        if self.lane is Lane.BETWEEN:
            text, self._space = self._space + text, ""
            if text.isspace():
                self._space = text
                return
            self.lane = Lane.ANSWER
        append(events, Content(text))
