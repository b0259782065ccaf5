"""A backend that keeps account of KV instead of computing it, so that a wrong block is noticed at once.

A cell holds the token whose K and V would be there. Token values say where they belong: the token at
`position` of sequence number s is s * STRIDE + position. So every read can be checked, whatever the scheduler
did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        self.rode = 0  # tokens of prompts in rows whose answer nobody looks at
        self.engine: Engine | None = None
        self._window = window
        self._cells: dict[tuple[KVGroup, int, int], int] = {}
        self._uncleared: set[tuple[KVGroup, int]] = set()  # blocks that rows began, as the kernel does

    def prepare(self) -> None:
        """Nothing to get ready."""

    def prefill(self, chunks: Sequence[Span]) -> None:
        tokens = sum(len(span.tokens) for span in chunks)
        self.calls.append((0, tokens))
        self.fed += tokens
        for span in chunks:
            self._check_begin(span)
            self._feed(span)

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        self.most_rows = max(self.most_rows, len(rows))
        self.calls.append((len(rows), steps))
        self._check_slots(rows, steps)
        self.rode += sum(not row.prompt for row in rows)
        tokens: list[int | None] = [row.token for row in rows]
        for step in range(steps):
            for row, token in zip(rows, tokens, strict=True):
                if token is not None:  # all are written before any is read
                    self._write(row.tables, row.position + step, token, uncleared=True)
            made: list[Sampled | None] = []
            for index, row in enumerate(rows):
                token = tokens[index]
                if token is None:
                    made.append(None)
                    continue
                self._check(Span([token], row.position + step, row.tables))
                made.append(Sampled(token + 1, None))
                tokens[index] = None if row.ends(token + 1, step + 1) else token + 1
            yield made
            if all(token is None for token in tokens) or interrupt.is_set():
                return

    def _check_slots(self, rows: Sequence[DecodeRow], steps: int) -> None:
        """The rows of a slot are one sequence's, at consecutive positions, and then there is one step."""
        if not 1 <= len(rows) <= self.max_rows:
            raise LedgerError(f"{len(rows)} rows, and there is room for {self.max_rows}")
        for slot in {row.slot for row in rows}:
            own = [row for row in rows if row.slot == slot]
            positions = sorted(row.position for row in own)
            if positions != list(range(positions[0], positions[0] + len(own))):
                raise LedgerError(f"two sequences share slot {slot}, or it has rows at {positions}")
            if (len(own) > 1 and steps > 1) or any(row.tables is not own[0].tables for row in own):
                raise LedgerError(f"slot {slot} has {len(own)} rows, for {steps} steps")

    def _feed(self, span: Span) -> None:
        for position, token in enumerate(span.tokens, span.start):
            self._write(span.tables, position, token)
        self._check(span)

    def _check(self, span: Span) -> None:
        """A span's tokens are the sequence's, and it sees what it should."""
        tokens = self._tokens_of(span.tables)
        if list(span.tokens) != tokens[span.start : span.end]:
            raise LedgerError(f"the tokens at {span.start} are not the sequence's: {span.tokens}")
        for position in range(span.start, span.end):
            self._read(span.tables, position, tokens)

    def _check_begin(self, span: Span) -> None:
        """A chunk does not go on inside a block that a row began, which nobody has cleared."""
        for group, table in span.tables.items():
            if span.start % BLOCK_TOKENS and (group, table[span.start // BLOCK_TOKENS]) in self._uncleared:
                raise LedgerError(f"a chunk goes on at {span.start} where rows were before it")

    def _tokens_of(self, tables: BlockTables) -> list[int]:
        """The tokens of the running sequence whose tables these are."""
        assert self.engine is not None
        [request] = [
            sequence.request
            for sequence in self.engine._scheduler.running
            if sequence.blocks.tables is tables
        ]
        return request.prompt + request.output

    def _write(self, tables: BlockTables, position: int, token: int, *, uncleared: bool = False) -> None:
        for group, table in tables.items():
            block = table[position // BLOCK_TOKENS]
            if block == NO_BLOCK:
                raise LedgerError(f"position {position} is written into a block that was given back")
            if position % BLOCK_TOKENS == 0:
                (self._uncleared.add if uncleared else self._uncleared.discard)((group, block))
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


class LayeredLedger(LedgerBackend):
    """One whose chunks take five layers, each of which writes their cells, and reads what they see."""

    layers = 5
    full = (True,) * 5

    def begin(self, chunks: Sequence[Span]) -> Callable[[int], None]:
        for span in chunks:
            self._check_begin(span)
        done = 0

        def advance(layers: int) -> None:
            nonlocal done
            done += layers
            if not 0 < layers <= done <= self.layers:
                raise LedgerError(f"{layers} layers, {done} of {self.layers} in all")
            tokens = sum(len(span.tokens) for span in chunks)
            self.calls.append((0, tokens))
            if done == self.layers:
                self.fed += tokens
            for span in chunks:
                self._feed(span)

        return advance


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
    riding_rows: int = 0,
    pace: Pace | None = None,
    ledger: type[LedgerBackend] = LedgerBackend,
) -> tuple[Engine, LedgerBackend]:
    rows = max(max_sequences, riding_rows)
    backend = ledger(window=window, max_rows=rows, max_steps=max_steps)
    engine = Engine(
        backend=backend,
        prefiller=backend,
        scheduler=Scheduler(
            blocks(sizes, window=window, prefix_cache=prefix_cache),
            pace=pace or Pace(most=chunk_tokens, gap=1e9),
            max_sequences=max_sequences,
            max_steps=max_steps,
            riding_rows=riding_rows,
        ),
        tokenizer=cast(Tokenizer, SilentTokenizer()),
        vocab_size=1000 * STRIDE,
        max_context=max_context,
        queue=queue,
    )
    backend.engine = engine
    return engine, backend
