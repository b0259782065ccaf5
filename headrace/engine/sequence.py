"""A request while the engine works on it: how much of it has KV, and where that KV is."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.backend import DecodeRow
from headrace.engine.blocks import SequenceBlocks
from headrace.engine.request import Request
from headrace.engine.text import TextAssembler
from headrace.model.sampling import SamplingParams

NO_SLOT = -1
FED = SamplingParams(temperature=0)  # of rows whose samples nobody looks at: the least work


@dataclass(eq=False, slots=True)
class Sequence:
    """Engine-side state of one request.

    `computed` counts the leading tokens whose KV is in the cache. A sequence decodes when that is all but the
    last one; before, it is being prefilled. `slot` numbers it among the running ones. `tail_at` is the
    position up to which it has left tails to the prefix cache. The KV of an `unusable` one may be no numbers.
    One that `rides` is fed the rest of its prompt in decode rows.
    """

    request: Request
    blocks: SequenceBlocks
    assembler: TextAssembler
    computed: int = 0
    tail_at: int = 0
    slot: int = NO_SLOT
    ended: bool = False
    unusable: bool = False
    rides: bool = False

    def row(self) -> DecodeRow:
        """The decode row that continues this sequence: its last token, once all before it have their KV."""
        request = self.request
        return DecodeRow(
            slot=self.slot,
            token=request.output[-1] if request.output else request.prompt[-1],
            position=self.length - 1,
            tables=self.blocks.tables,
            prompt=request.prompt,
            output=request.output,
            params=request.params,
            seed=request.seed,
            max_tokens=self.tokens_left,
            stop_token_ids=request.stop_token_ids,
            constraint=request.constraint,
        )

    def fed_rows(self, count: int) -> list[DecodeRow]:
        """Rows that feed the next `count` tokens; what follows these is known, so they sample nothing."""
        start = self.computed
        return [
            DecodeRow(
                slot=self.slot,
                token=token,
                position=position,
                tables=self.blocks.tables,
                prompt=(),
                output=(),
                params=FED,
                seed=0,
                max_tokens=1,
                stop_token_ids=frozenset(),
            )
            for position, token in enumerate(self.tokens(start, start + count), start)
        ]

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.request.output)

    @property
    def decodes(self) -> bool:
        return self.computed == self.length - 1

    @property
    def to_feed(self) -> int:
        """How many tokens are to be fed before it decodes."""
        return self.length - 1 - self.computed

    @property
    def tokens_left(self) -> int:
        """How many more tokens the request may make."""
        return self.request.max_tokens - len(self.request.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt, output = self.request.prompt, self.request.output
        border = len(prompt)
        return prompt[start:end] + output[max(0, start - border) : max(0, end - border)]
