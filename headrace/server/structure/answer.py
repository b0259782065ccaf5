"""One answer kept to its structure: which tokens may come next.

    thoughts -> which block -> inside the block, by its grammar or free -> another block, or the end

Thoughts are free, but for the markers that would leave them in another way. Most markers are single tokens,
and no grammar contains one, so none can appear inside the strings of what a grammar makes. What closes the
thoughts may also be text, split over tokens in any way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from headrace.model.constraint import Mask, mask_of, mask_words

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of an answer, ended by one of the tokens `close`. `grammar` None: its content is free.

    `last`: nothing but the end comes after it.
    """

    close: Collection[int]
    grammar: Any | None
    last: bool = True


class _State(Enum):
    THINKING = auto()
    OPENING = auto()
    INSIDE = auto()
    DONE = auto()


class StructuredAnswer:
    """A Constraint. `blocks` maps the token that opens a block to it; None is a block that is open already.

    `end_thinking` closes the thoughts in which the answer begins, a token or text (None: it does not begin
    in thoughts); `outside` are the tokens that no thought contains; `ends` are those that end the answer.
    `bytes_of` gives the text of a token.
    """

    def __init__(
        self,
        blocks: Mapping[int | None, Block],
        *,
        end_thinking: int | bytes | None,
        outside: Collection[int],
        ends: Collection[int],
        vocab_size: int,
        bytes_of: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        self._blocks = blocks
        self._end_thinking = end_thinking
        self._ends = ends
        self._vocab_size = vocab_size
        self._bytes_of = bytes_of
        self._thought = b""  # the last of it, which may begin what closes the thoughts
        self._thoughts = ~mask_of({*outside, *ends} - {end_thinking}, vocab_size)
        self._buffer = np.zeros((1, mask_words(vocab_size)), dtype=np.int32)
        self._matcher: Any = None
        self._block: Block | None = None
        self._state = _State.THINKING
        if end_thinking is None:
            self._open()

    def mask(self) -> Mask | None:
        match self._state:
            case _State.THINKING:
                return self._thoughts
            case _State.OPENING:
                return mask_of((token for token in self._blocks if token is not None), self._vocab_size)
            case _State.INSIDE:
                return self._inside()
        more = () if self._block is None or self._block.last else (t for t in self._blocks if t is not None)
        return mask_of({*self._ends, *more}, self._vocab_size)

    def accept(self, token: int) -> None:
        if self._state is _State.THINKING:
            self._think(token)
        elif self._state is _State.INSIDE:
            self._accept_inside(token)
        elif token in self._blocks:
            self._enter(self._blocks[token])

    def _think(self, token: int) -> None:
        if not isinstance(self._end_thinking, bytes):
            if token == self._end_thinking:
                self._open()
            return
        self._thought += self._bytes_of(token)
        _, closed, rest = self._thought.partition(self._end_thinking)
        self._thought = self._thought[1 - len(self._end_thinking) :]
        if closed:
            self._open()
            # A token can reach beyond the end of the thoughts. White space between blocks is nobody's.
            if (
                (rest := rest.lstrip())
                and self._matcher is not None
                and not self._matcher.accept_string(rest)
            ):
                log.error("%r does not begin what its grammar allows; the answer goes on without it", rest)
                self._matcher = None

    def _open(self) -> None:
        """The thoughts are over."""
        self._state = _State.OPENING
        if None in self._blocks:
            self._enter(self._blocks[None])

    def _enter(self, block: Block) -> None:
        import xgrammar

        self._block = block
        self._state = _State.INSIDE
        self._matcher = None
        if block.grammar is not None:
            self._matcher = xgrammar.GrammarMatcher(block.grammar, override_stop_tokens=list(block.close))

    def _inside(self) -> Mask | None:
        if self._matcher is None:
            return None
        self._matcher.fill_next_token_bitmask(self._buffer)
        mask: Mask = self._buffer[0]
        return mask if mask.any() else None  # nothing fits: better a free answer than a dead engine

    def _accept_inside(self, token: int) -> None:
        assert self._block is not None
        if self._matcher is None:
            if token in self._block.close:
                self._state = _State.DONE
        elif not self._matcher.accept_token(token):
            log.error("token %d does not follow in its grammar; the answer goes on without it", token)
            self._matcher = None
        elif self._matcher.is_terminated():
            self._state = _State.DONE
