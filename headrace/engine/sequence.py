"""A request while the engine works on it: how much of it has KV, and where that KV is."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.backend import DecodeRow
from headrace.engine.blocks import SequenceBlocks
from headrace.engine.request import Request
from headrace.engine.text import TextAssembler

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """Engine-side state of one request.

    `computed` counts the leading tokens whose KV is in the cache. A sequence decodes when that is all but the
    last one; before, it is being prefilled. `slot` numbers it among the running ones. `tail_at` is the
    position of the last tail that it left to the prefix cache. The KV of an `unusable` one may be no numbers.
    """

    request: Request
    blocks: SequenceBlocks
    assembler: TextAssembler
    computed: int = 0
    tail_at: int = 0
    slot: int = NO_SLOT
    ended: bool = False
    unusable: bool = False

    def row(self) -> DecodeRow:
        """The decode row that continues this sequence: its last token, at the first position without KV."""
        request = self.request
        return DecodeRow(
            slot=self.slot,
            token=request.output[-1] if request.output else request.prompt[-1],
            position=self.computed,
            tables=self.blocks.tables,
            prompt=request.prompt,
            output=request.output,
            params=request.params,
            seed=request.seed,
            max_tokens=self.tokens_left,
            stop_token_ids=request.stop_token_ids,
            constraint=request.constraint,
        )

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.request.output)

    @property
    def decodes(self) -> bool:
        return self.computed == self.length - 1

    @property
    def tokens_left(self) -> int:
        """How many more tokens the request may make."""
        return self.request.max_tokens - len(self.request.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt, output = self.request.prompt, self.request.output
        border = len(prompt)
        return prompt[start:end] + output[max(0, start - border) : max(0, end - border)]
