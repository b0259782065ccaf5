"""What the next step runs: decode rows of the sequences that have their KV, chunks of prompts for the rest.

All running sequences decode in every step. Prompts are filled by chunks before it, as large as `Pace` finds
short enough, so that no prompt stops the others for long. What is left of prompts may be so little that the
rows which a step has beside those of decoding sequences take it sooner: then it rides in these, and the last
token of a prompt with it, whose row gives the first token of the answer. A piece that has begun to ride goes
on so. While a prompt is being filled, or somebody waits, a call of the backend takes one step, otherwise as
many as it can.

When the KV pool is full the sequence admitted last gives up its blocks and goes back to the head of the
queue; its tokens are kept and its KV is computed again later. Whoever was admitted first is therefore never
preempted, and a pool that holds one sequence of full length (checked when the engine is built) always makes
progress.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.engine.backend import DecodeRow
from headrace.engine.blocks import BlockManager
from headrace.engine.counters import Counters
from headrace.engine.filling import Filling
from headrace.engine.pace import Pace
from headrace.engine.prefix import TAIL_TOKENS
from headrace.engine.sequence import NO_SLOT, Sequence
from headrace.model.batch import Span
from headrace.model.kv import BLOCK_TOKENS
from headrace.model.tiled import LEAST, TILE

LONG_PROMPT = 1024  # tokens from which on the log says why a prompt was not found in the prefix cache

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Plan:
    """One step: `chunks` to prefill and `rows` to decode for up to `steps` steps, with whose they are.

    `filling` is a pass over chunks of an earlier step that has layers left; then no chunks begin.
    Beside `rows`, `fed` are rows that feed prompts, in one step; what follows their tokens is known. `filled`
    are those that wanted their prompt to be fed and nothing else, which has been done: they run no longer.
    """

    chunks: list[Span] = field(default_factory=list)
    chunk_owners: list[Sequence] = field(default_factory=list)
    rows: list[DecodeRow] = field(default_factory=list)
    row_owners: list[Sequence] = field(default_factory=list)
    fed: list[DecodeRow] = field(default_factory=list)
    fed_owners: list[Sequence] = field(default_factory=list)
    filled: list[Sequence] = field(default_factory=list)
    filling: Filling | None = None
    steps: int = 1

    def __bool__(self) -> bool:
        return bool(self.rows or self.chunks or self.fed or self.filled or self.filling)


def shares(prefilling: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """How many prompt tokens each of `prefilling`, in order of admission, may take of the budget.

    Small prompts pass big ones: what is shortest goes first. The oldest keeps half of the budget, rounded up,
    so that a stream of small ones cannot starve it. It always gets on: where a pool is full, nobody else may.
    """
    if not prefilling:
        return []
    left = {sequence: sequence.to_feed for sequence in prefilling}
    oldest = prefilling[0]
    given = {oldest: min(left[oldest], budget - budget // 2)}
    budget -= given[oldest]
    for sequence in sorted(prefilling[1:], key=lambda sequence: left[sequence]):
        given[sequence] = min(left[sequence], budget)
        budget -= given[sequence]
    given[oldest] = min(left[oldest], given[oldest] + budget)
    return [(sequence, given[sequence]) for sequence in prefilling]


def end_of_chunk(sequence: Sequence, tokens: int) -> int:
    """The position before which the next chunk of a prompt ends if it may have so many tokens: that of the
    prompt or a whole tile where it is worth it, as what sticks out attends at half the speed.
    """
    end = sequence.computed + tokens
    whole = end // TILE * TILE
    return whole if tokens < sequence.to_feed and whole - sequence.computed >= LEAST * TILE else end


class Scheduler:
    """Waiting and running sequences. Only the engine's thread calls it.

    Prompts may ride in steps of up to `riding_rows` rows; 0: they do not ride.
    """

    def __init__(
        self, blocks: BlockManager, *, pace: Pace, max_sequences: int, max_steps: int, riding_rows: int = 0
    ) -> None:
        self.blocks = blocks
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0
        self.counters = Counters()
        self._max_steps = max_steps
        self._riding_rows = riding_rows
        # The head of the queue for which there was no room, and how many blocks had been released by then.
        self._refused: tuple[Sequence, int] | None = None
        self.filling: Filling | None = None
        self.slots = max_sequences
        self._free_slots = list(range(max_sequences))

    @property
    def free_slots(self) -> int:
        """How many more sequences may run."""
        return len(self._free_slots)

    def schedule(self) -> Plan:
        """Decide the next step and allocate what it writes to. An empty plan means there is nothing to do."""
        complete = [sequence for sequence in self.running if sequence.decodes]
        decoding = [sequence for sequence in complete if sequence.tokens_left]
        filled = [sequence for sequence in complete if not sequence.tokens_left]
        for sequence in filled:  # before others need blocks: nobody is to be preempted who is done
            self._leave(sequence)
        preemptions = self.preemptions
        plan = Plan(filled=filled, steps=self._steps(decoding))
        self._reserve(decoding, plan.steps)
        if self.preemptions == preemptions:  # what was just preempted must not come back in the same step
            self._admit()
        if len(self.running) > len(decoding):
            decoding += self._plan_prompts(plan, len(decoding))
        self._plan_rows(plan, decoding)
        plan.filling = self.filling
        return plan

    def _steps(self, decoding: list[Sequence]) -> int:
        """Several steps a call only where nobody else waits for the call to end."""
        if self._max_steps == 1 or self.waiting or len(decoding) < len(self.running):
            return 1
        most = max((sequence.tokens_left for sequence in decoding), default=1)
        return min(self._max_steps, most)

    def _reserve(self, decoding: Iterable[Sequence], steps: int) -> None:
        """Give every decoding sequence blocks for its next `steps` tokens, preempting where they lack."""
        for sequence in decoding:
            ahead = sequence.length + min(steps, sequence.tokens_left) - 1
            if ahead <= sequence.blocks.capacity:
                continue
            while sequence.slot != NO_SLOT and not self.blocks.grow(sequence.blocks, ahead):
                self._preempt(self.running[-1])

    def _plan_rows(self, plan: Plan, decoding: Iterable[Sequence]) -> None:
        for sequence in decoding:
            if sequence.slot != NO_SLOT:  # else preempted while this step was planned
                plan.row_owners.append(sequence)
                plan.rows.append(sequence.row())

    def _plan_prompts(self, plan: Plan, streams: int) -> list[Sequence]:
        """Have what is left of prompts ride beside `streams` decoding sequences, or spend the step's budget
        on chunks of them. Gives the sequences whose prompt is complete by that: these decode as well."""
        under_way = self.filling.owners if self.filling is not None else ()
        prefilling = [
            sequence for sequence in self.running if not sequence.decodes and sequence not in under_way
        ]
        # No more than a block, so that nobody's prompt leaps over the end of one, where tails are kept.
        free = min(max(self._riding_rows - streams, 0), BLOCK_TOKENS)
        riders = self._riders(prefilling, streams, free)
        rides = dict(shares(riders, free))
        others = [sequence for sequence in prefilling if sequence not in rides]
        budget = 0 if under_way else self._budget(others, streams)
        chunks = dict(shares(others, budget))
        free -= sum(rides.values())
        complete: list[Sequence] = []
        for sequence in prefilling:  # in order of admission: one may only be preempted for those before it
            if sequence.slot == NO_SLOT:
                continue
            if sequence in chunks:
                self._plan_chunk(plan, sequence, end_of_chunk(sequence, chunks[sequence]))
            elif self._plan_ride(plan, sequence, rides[sequence], decode=len(complete) < free):
                complete.append(sequence)
        return complete

    def _budget(self, prompts: list[Sequence], streams: int) -> int:
        """How many tokens of `prompts` may begin, as if all of them had the longest past."""
        past = max((sequence.computed for sequence in prompts), default=0)
        bearable = self.pace.bearable(streams=streams, past=past)
        return min(self.pace.tokens(streams=streams, prompts=len(prompts)), bearable)

    def _riders(self, prefilling: list[Sequence], streams: int, free: int) -> list[Sequence]:
        """Those that are fed in `free` decode rows: all, or those that have begun so, or none.

        One that has begun goes on: the kernel does not clear a block when it writes the first token of it,
        and a chunk that went on inside could read what a request that failed has left there. Prompts to be
        scored need chunks.
        """
        plain = [sequence for sequence in prefilling if not sequence.request.wants_scores]
        left = sum(sequence.to_feed for sequence in plain)
        wait = self.filling.seconds_left if self.filling is not None else 0.0
        if plain and self.pace.rides(left, streams=streams, free=free, wait=wait):
            for sequence in plain:
                sequence.rides = True
        return [sequence for sequence in plain if sequence.rides]

    def _plan_ride(self, plan: Plan, sequence: Sequence, tokens: int, *, decode: bool) -> bool:
        """Add rows for the next `tokens` of a prompt, if there are blocks for them. With `decode` the row
        after them may be one that decodes; whether it is."""
        decode = decode and tokens == sequence.to_feed and sequence.tokens_left > 0
        if not tokens or not self._reserve_chunk(sequence, sequence.computed + tokens + decode):
            return False
        plan.fed += sequence.fed_rows(tokens)
        plan.fed_owners += [sequence] * tokens
        return decode

    def _plan_chunk(self, plan: Plan, sequence: Sequence, end: int) -> None:
        """Add the chunk of a sequence that ends before position `end`, if there are blocks for it."""
        start = sequence.computed
        if end > start and self._reserve_chunk(sequence, end):
            plan.chunks.append(Span(sequence.tokens(start, end), start, sequence.blocks.tables))
            plan.chunk_owners.append(sequence)

    def _reserve_chunk(self, sequence: Sequence, end: int) -> bool:
        """Blocks for a chunk, or for rows. Only sequences admitted later may be preempted for it."""
        while not self.blocks.grow(sequence.blocks, end):
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        return True

    def _admit(self) -> None:
        """Let the queue in while there are slots, and room for all that its head has so far."""
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            if self._refused == (sequence, self.blocks.releases):
                return
            if not sequence.request.wants_scores:  # else every token has to be fed
                sequence.computed = self.blocks.adopt(sequence.blocks, sequence.tokens(0, sequence.length))
            if self.running and not self.blocks.can_hold(sequence.blocks, sequence.length):
                self.blocks.release(sequence.blocks)
                sequence.computed = 0
                self._refused = (sequence, self.blocks.releases)
                return
            sequence.tail_at = sequence.computed
            self._note_cached(sequence)
            self.waiting.popleft()
            sequence.slot = heapq.heappop(self._free_slots)
            self.running.append(sequence)

    def _note_cached(self, sequence: Sequence) -> None:
        """Keep how much of its prompt was known, and say in the log why of a long one so little was."""
        request = sequence.request
        if request.admitted is not None:  # it has run before, and came back after a preemption
            return
        request.admitted = time.monotonic()
        request.cached_tokens = sequence.computed
        length = len(request.prompt)
        cache = None if request.wants_scores else self.blocks.cache
        self.counters.count_prompt(length, cached=sequence.computed, looked_up=cache is not None)
        if cache is None or length < LONG_PROMPT or sequence.computed >= length // 2:
            return
        difference = cache.difference(request.prompt)
        if difference is not None:
            position, known, given = difference
            logger.info(
                "request %d: %d of its %d tokens are cached; it parts from an earlier prompt at token %d, "
                "where it has %d and that one %d",
                request.id, sequence.computed, length, position, given, known,
            )  # fmt: skip

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        sequence.computed = 0
        sequence.rides = False
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence off the running list; its slot and blocks are free from here on, or cached."""
        if self.filling is not None and sequence in self.filling.owners:
            self.filling = None  # it would go on to write into blocks that are another's by then
        self.running.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = NO_SLOT
        if sequence.unusable:
            self.blocks.forget(sequence.blocks)
        else:
            self._remember(sequence)
            self.blocks.keep_tail(sequence.blocks)
        self.blocks.release(sequence.blocks)

    def reclaim(self) -> None:
        """Free what ended sequences held, and the sliding blocks that nobody can see any more.

        Called when the backend has finished a call, not before: until then it may read those blocks.
        """
        for sequence in [sequence for sequence in self.running if sequence.ended]:
            self._leave(sequence)
        for sequence in self.running:
            if sequence.computed >= sequence.blocks.trim_at:
                self._remember(sequence)
                self.blocks.trim(sequence.blocks, sequence.computed)

    def _remember(self, sequence: Sequence) -> None:
        """Let the prefix cache know the full blocks, with a tail where others are likely to go on."""
        parting = self.blocks.remember(sequence.blocks, sequence.tokens, sequence.computed)
        position = sequence.computed // BLOCK_TOKENS * BLOCK_TOKENS
        prompt_end = (len(sequence.request.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if parting is not None and parting.depth * BLOCK_TOKENS <= prompt_end:
            self.blocks.keep_parting(sequence.blocks, parting)
        passed = (sequence.tail_at // TAIL_TOKENS + 1) * TAIL_TOKENS
        for end in range(passed, position + 1, TAIL_TOKENS):  # a chunk need not end there
            self.blocks.keep_tail(sequence.blocks, end)
        if position == prompt_end:
            self.blocks.keep_tail(sequence.blocks)
        sequence.tail_at = position

    def remove_waiting(self, sequence: Sequence) -> None:
        """Forget a sequence that waits; it holds nothing."""
        self.waiting.remove(sequence)

    def check(self) -> None:
        """Raise RuntimeError if blocks or slots have leaked. Cheap enough for idle moments, not for steps."""
        self.blocks.check(sequence.blocks for sequence in self.running)
        slots = sorted(self._free_slots + [sequence.slot for sequence in self.running])
        if slots != list(range(self.slots)):
            raise RuntimeError(f"slots {slots} are not each of {self.slots} once")
