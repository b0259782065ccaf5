"""A backend that keeps account of KV instead of computing it, so that a wrong block is noticed at once.

A cell holds the token whose K and V would be there. Token values say where they belong: the token at
`position` of sequence number s is s * STRIDE + position. So every read can be checked, whatever the scheduler
did before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.blocks import BlockManager
from headrace.engine.engine import Engine
from headrace.engine.pace import Pace
from headrace.engine.request import FinishReason, Output
from headrace.engine.scheduler import Scheduler
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, NO_BLOCK, BlockTables
from headrace.model.sampler import Sampled
from headrace.model.tokenizer import Tokenizer

STRIDE = 1_000_000


class LedgerError(AssertionError):
    """A row read a cell that does not hold what its sequence wrote there."""


class LedgerBackend:
    """Prefiller and decode backend over a ledger of cells instead of K and V."""

    name = "ledger"

    def __init__(self, *, window: int | None, max_rows: int, max_steps: int) -> None:
        self.max_rows = max_rows
        self.max_steps = max_steps
        self.most_rows = 0
        self.calls: list[tuple[int, int]] = []  # (rows, chunk tokens or steps) for tests of the schedule
        self.fed = 0  # tokens of chunks, to tell what the prefix cache spared
        self.engine: Engine | None = None
        self._window = window
        self._cells: dict[tuple[KVGroup, int, int], int] = {}

    def prepare(self) -> None:
        """Nothing to get ready."""

    def prefill(self, chunks: Sequence[Span]) -> None:
        tokens = sum(len(span.tokens) for span in chunks)
        self.calls.append((0, tokens))
        self.fed += tokens
        for span in chunks:
            self._feed(span)

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        self.most_rows = max(self.most_rows, len(rows))
        self.calls.append((len(rows), steps))
        if len({row.slot for row in rows}) != len(rows):
            raise LedgerError("two rows share a slot")
        tokens: list[int | None] = [row.token for row in rows]
        for step in range(steps):
            made: list[Sampled | None] = []
            for index, row in enumerate(rows):
                token = tokens[index]
                if token is None:
                    made.append(None)
                    continue
                self._feed(Span([token], row.position + step, row.tables))
                made.append(Sampled(token + 1, None))
                tokens[index] = None if row.ends(token + 1, step + 1) else token + 1
            yield made
            if all(token is None for token in tokens) or interrupt.is_set():
                return

    def _feed(self, span: Span) -> None:
        tokens = self._tokens_of(span.tables)
        if list(span.tokens) != tokens[span.start : span.end]:
            raise LedgerError(f"the tokens at {span.start} are not the sequence's: {span.tokens}")
        for position in range(span.start, span.end):
            self._write(span.tables, position, tokens[position])
        for position in range(span.start, span.end):
            self._read(span.tables, position, tokens)

    def _tokens_of(self, tables: BlockTables) -> list[int]:
        """The tokens of the running sequence whose tables these are."""
        assert self.engine is not None
        [request] = [
            sequence.request
            for sequence in self.engine._scheduler.running
            if sequence.blocks.tables is tables
        ]
        return request.prompt + request.output

    def _write(self, tables: BlockTables, position: int, token: int) -> None:
        for group, table in tables.items():
            block = table[position // BLOCK_TOKENS]
            if block == NO_BLOCK:
                raise LedgerError(f"position {position} is written into a block that was given back")
            self._cells[group, block, position % BLOCK_TOKENS] = token

    def _read(self, tables: BlockTables, position: int, tokens: Sequence[int]) -> None:
        for group, table in tables.items():
            first = 0
            if group is KVGroup.SLIDING and self._window is not None:
                first = max(0, position - self._window + 1)
            for seen in range(first, position + 1):
                cell = self._cells.get((group, table[seen // BLOCK_TOKENS], seen % BLOCK_TOKENS))
                if cell != tokens[seen]:
                    raise LedgerError(
                        f"a query at {position} reads {cell} at {seen} of {group}, not {tokens[seen]}"
                    )


class SilentStream:
    """A token stream without text."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class SilentTokenizer:
    """The part of a tokenizer that the engine uses."""

    eos_token_ids: tuple[int, ...] = ()

    def stream(self, *, skip_special_tokens: bool = True) -> SilentStream:
        return SilentStream()


class Client:
    """Submits requests and keeps what comes back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}

    def sink(self, number: int, output: Output) -> None:
        assert number not in self.reasons, "an output after the last one"
        self.tokens[number].extend(output.token_ids)
        if output.finish_reason is not None:
            self.reasons[number] = output.finish_reason


def prompt_of(number: int, length: int) -> list[int]:
    return [number * STRIDE + position for position in range(length)]


def ledger_engine(
    sizes: Mapping[KVGroup, int],
    *,
    window: int | None = None,
    max_sequences: int = 4,
    chunk_tokens: int = 96,
    max_steps: int = 4,
    max_context: int = 512,
    queue: int = 64,
    prefix_cache: bool = False,
    blocks: type[BlockManager] = BlockManager,
) -> tuple[Engine, LedgerBackend]:
    backend = LedgerBackend(window=window, max_rows=max_sequences, max_steps=max_steps)
    engine = Engine(
        backend=backend,
        prefiller=backend,
        scheduler=Scheduler(
            blocks(sizes, window=window, prefix_cache=prefix_cache),
            pace=Pace(most=chunk_tokens, gap=1e9),
            max_sequences=max_sequences,
            max_steps=max_steps,
        ),
        tokenizer=cast(Tokenizer, SilentTokenizer()),
        vocab_size=1000 * STRIDE,
        max_context=max_context,
        queue=queue,
    )
    backend.engine = engine
    return engine, backend
