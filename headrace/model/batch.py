"""What a forward pass is given: tokens of several sequences, laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.model.kv import BlockTables


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence, the first of them at position `start`.

    The tables must cover every position up to start + len(tokens) - 1 that a layer of their group can see;
    the pass writes the K and V of these tokens into them and reads the past from them. One token is a decode
    row; more are a chunk of a prompt. A layer writes the K and V of all spans before it reads any, so several
    spans of one pass may continue one another in the same sequence.
    """

    tokens: Sequence[int]
    start: int
    tables: BlockTables

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)
