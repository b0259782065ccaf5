"""What the next step runs: decode rows of the sequences that have their KV, chunks of prompts for the rest.

All running sequences decode in every step, and up to `chunk_tokens` tokens of prompt ride along, so that no
prompt stops the others for longer than a chunk takes. While a prompt is being filled, or somebody waits, a
call of the backend takes one step, otherwise as many as it can.

When the KV pool is full the sequence admitted last gives up its blocks and goes back to the head of the
queue; its tokens are kept and its KV is computed again later. Whoever was admitted first is therefore never
preempted, and a pool that holds one sequence of full length (checked when the engine is built) always makes
progress.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.engine.backend import DecodeRow
from headrace.engine.blocks import BlockManager
from headrace.engine.sequence import NO_SLOT, Sequence
from headrace.model.batch import Span


@dataclass(slots=True)
class Plan:
    """One step: `chunks` to prefill and `rows` to decode for up to `steps` steps, with whose they are."""

    chunks: list[Span] = field(default_factory=list)
    chunk_owners: list[Sequence] = field(default_factory=list)
    rows: list[DecodeRow] = field(default_factory=list)
    row_owners: list[Sequence] = field(default_factory=list)
    chunk_tokens: int = 0
    steps: int = 1

    def __bool__(self) -> bool:
        return bool(self.rows or self.chunks)


class Scheduler:
    """Waiting and running sequences. Only the engine's thread calls it."""

    def __init__(
        self, blocks: BlockManager, *, max_sequences: int, chunk_tokens: int, max_steps: int
    ) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0
        self._chunk_tokens = chunk_tokens
        self._max_steps = max_steps
        self._free_slots = list(range(max_sequences))

    @property
    def free_slots(self) -> int:
        """How many more sequences may run."""
        return len(self._free_slots)

    def schedule(self) -> Plan:
        """Decide the next step and allocate what it writes to. An empty plan means there is nothing to do."""
        decoding = [sequence for sequence in self.running if sequence.decodes]
        preemptions = self.preemptions
        plan = Plan(steps=self._steps())
        self._reserve(decoding, plan.steps)
        self._plan_chunks(plan)
        if self.preemptions == preemptions:  # what was just preempted must not come back in the same step
            self._admit(plan)
        self._plan_rows(plan, decoding)
        return plan

    def _steps(self) -> int:
        """Several steps a call only where nobody else waits for the call to end."""
        if self.waiting or not all(sequence.decodes for sequence in self.running):
            return 1
        most = max((sequence.tokens_left for sequence in self.running), default=1)
        return max(1, min(self._max_steps, most))

    def _reserve(self, decoding: Iterable[Sequence], steps: int) -> None:
        """Give every decoding sequence blocks for its next `steps` tokens, preempting where they lack."""
        for sequence in decoding:
            ahead = sequence.length + min(steps, sequence.tokens_left) - 1
            while sequence.slot != NO_SLOT and not self.blocks.grow(sequence.blocks, ahead):
                self._preempt(self.running[-1])

    def _plan_rows(self, plan: Plan, decoding: Iterable[Sequence]) -> None:
        for sequence in decoding:
            if sequence.slot != NO_SLOT:  # else preempted while this step was planned
                plan.row_owners.append(sequence)
                plan.rows.append(sequence.row())

    def _plan_chunks(self, plan: Plan) -> None:
        """Spend the step's budget of prompt tokens, first come, first served."""
        for sequence in self.running.copy():
            if sequence.slot != NO_SLOT and not sequence.decodes:
                self._plan_chunk(plan, sequence)

    def _plan_chunk(self, plan: Plan, sequence: Sequence) -> None:
        """Add the next chunk of a sequence, as large as the budget and the pool allow."""
        start = sequence.computed
        end = min(sequence.length - 1, start + self._chunk_tokens - plan.chunk_tokens)
        if end > start and self._reserve_chunk(sequence, end):
            plan.chunks.append(Span(sequence.tokens(start, end), start, sequence.blocks.tables))
            plan.chunk_owners.append(sequence)
            plan.chunk_tokens += end - start

    def _reserve_chunk(self, sequence: Sequence, end: int) -> bool:
        """Blocks for a chunk. Only sequences admitted later may be preempted for it."""
        while not self.blocks.grow(sequence.blocks, end):
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        return True

    def _admit(self, plan: Plan) -> None:
        """Let the queue in while there is budget, a slot, and room for all that its head has so far."""
        while self.waiting and self._free_slots and plan.chunk_tokens < self._chunk_tokens:
            if self.running and not self.blocks.can_hold(self.waiting[0].length):
                return
            sequence = self.waiting.popleft()
            sequence.slot = heapq.heappop(self._free_slots)
            self.running.append(sequence)
            self._plan_chunk(plan, sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence off the running list; its slot and blocks are free from here on."""
        self.running.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = NO_SLOT
        self.blocks.release(sequence.blocks)

    def reclaim(self) -> None:
        """Free what ended sequences held, and the sliding blocks that nobody can see any more.

        Called when the backend has finished a call, not before: until then it may read those blocks.
        """
        for sequence in [sequence for sequence in self.running if sequence.ended]:
            self._leave(sequence)
        for sequence in self.running:
            self.blocks.trim(sequence.blocks, sequence.computed)

    def remove_waiting(self, sequence: Sequence) -> None:
        """Forget a sequence that waits; it holds nothing."""
        self.waiting.remove(sequence)

    def check(self) -> None:
        """Raise RuntimeError if blocks or slots have leaked. Cheap enough for idle moments, not for steps."""
        self.blocks.check(sequence.blocks for sequence in self.running)
        slots = sorted(self._free_slots + [sequence.slot for sequence in self.running])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"slots {slots} are not each used once")
