"""From tokens to text, piece by piece, ended by stop strings.

The text ends before the stop string that is complete first; if several complete with the same character,
before the longest of them. This is what a reader of the stream would do, who stops as soon as any of them has
appeared: it needs no look-ahead, and how the text is split into tokens makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TokenStream(Protocol):
    """Decodes a sequence piece by piece; it holds back what may be part of a character."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class Pushed(NamedTuple):
    """What `tokens` tokens added: all that were pushed, or up to the one that completed a stop string."""

    text: str
    stopped: bool
    tokens: int


class StopStrings:
    """Text on its way out, ended before a stop string: what could begin one waits.

    `matched` is the stop string that was complete first, once there is one; nothing more comes after it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("an empty stop string would end every text at once; leave it out")
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._held = ""

    def __bool__(self) -> bool:
        return bool(self._stop)

    def push(self, new: str) -> str:
        """Add text to what is held back; what of it can be sent."""
        if self.matched is not None:
            return ""
        text = self._held + new
        if (found := self._first(text)) is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        border = self._possible(text)
        self._held = text[border:]
        return text[:border]

    def finish(self) -> str:
        """The end of the text: what is still held back."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        """The stop string that is complete first, and where it begins."""
        found = ((text.find(stop), stop) for stop in self._stop)
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(ends)[1:] if ends else None

    def _possible(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        border = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), border)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, border)
            if start >= 0:
                border = start
        return border


class TextAssembler:
    """The text of one request, in pieces that are safe to send.

    `stopped` turns true when a stop string is complete; nothing more comes after that.
    """

    def __init__(self, stream: TokenStream, stop: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self._stop.matched is not None

    def push_token(self, token: int) -> tuple[str, bool]:
        """Take one more token; the new text, and whether a stop string is now complete."""
        pushed = self.push((token,))
        return pushed.text, pushed.stopped

    def push(self, ids: Sequence[int]) -> Pushed:
        """Take tokens up to the one that completes a stop string, if there is one."""
        if self.stopped:
            return Pushed("", True, 0)
        if not self._stop:
            return Pushed(self._stream.push(ids), False, len(ids))
        pieces: list[str] = []
        for count, token in enumerate(ids, start=1):
            pieces.append(self._stop.push(self._stream.push((token,))))
            if self._stop.matched is not None:
                return Pushed("".join(pieces), True, count)
        return Pushed("".join(pieces), False, len(ids))

    def finish(self) -> str:
        """The end of the sequence: the text held back, and what is left of an incomplete character.

        That may complete a stop string after all; see `stopped`.
        """
        return self._stop.push(self._stream.flush()) + self._stop.finish()
