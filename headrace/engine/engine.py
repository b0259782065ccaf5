"""The engine: a step is schedule, run, postprocess.

`Engine.step` is the main loop's body. One thread owns the engine and calls it; `submit` and `cancel` may be
called from any thread and take effect at the next step's start (a cancellation interrupts a call that is
under way, so that this is at most one step of the model away).
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headrace.engine.backend import (
    DecodeBackend,
    Prefiller,
    Rehearsing,
    RehearsingSteps,
    takes_constraints,
)
from headrace.engine.filling import Filling
from headrace.engine.request import (
    ConstraintError,
    ContextLengthError,
    EngineDeadError,
    FinishReason,
    Output,
    OutputSink,
    PromptError,
    QueueFullError,
    Request,
    ScoringError,
)
from headrace.engine.scheduler import Plan, Scheduler
from headrace.engine.scoring import Scorer, score_chunk
from headrace.engine.sequence import NO_SLOT, Sequence
from headrace.engine.text import TextAssembler
from headrace.model.batch import Span
from headrace.model.constraint import Constraint
from headrace.model.kv import NO_BLOCK
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UNUSABLE = (
    "after {made} tokens the model's scores were not finite numbers. Other requests are not affected. Send "
    "this one again; if it fails again, check the weights, or run the model with --dtype float32"
)


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot for those who look in from outside."""

    running: int
    waiting: int
    preemptions: int
    free_blocks: dict[str, int]


@dataclass(frozen=True, slots=True)
class KVUse:
    """Blocks of one group: all, the free ones, and those that running requests hold. The rest is cached."""

    total: int
    free: int
    held: int

    @property
    def cached(self) -> int:
        """Blocks that only the prefix cache holds; they make way for requests."""
        return max(0, self.total - self.free - self.held)  # the figures need not be of one moment


class Engine:
    """Requests in, tokens out."""

    def __init__(
        self,
        *,
        backend: DecodeBackend,
        prefiller: Prefiller,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_context: int,
        queue: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._backend = backend
        self._prefiller = prefiller
        self._scheduler = scheduler
        self.counters = scheduler.counters
        self._tokenizer = tokenizer
        self._queue = queue
        self._lock = threading.Lock()  # guards the inboxes and what stops them
        self._dead: str | None = None
        self._arrived: collections.deque[Sequence] = collections.deque()
        self._cancelled: dict[Request, int] = {}  # with how many steps had been run by then
        self._live: dict[Request, Sequence] = {}
        self._interrupt = threading.Event()

    # Any thread.

    @property
    def capacity(self) -> int:
        """How many requests can be here at a time, running and waiting."""
        return self._queue + self._scheduler.slots

    def submit(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        sink: OutputSink,
        *,
        keep_markers: bool = False,
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a request. `keep_markers` leaves special tokens in its text, for those who parse it;
        `constraint` says which tokens may come.

        Raises PromptError or ParameterError for what the model cannot be given, ContextLengthError for what
        does not fit into the context, ConstraintError or ScoringError for what the backend cannot do,
        QueueFullError if too many wait, EngineDeadError after `fail`.
        """
        if constraint is not None and not takes_constraints(self._backend):
            raise ConstraintError(f"the {self._backend.name} backend cannot keep to a grammar")
        if params.prompt_logprobs is not None and not isinstance(self._prefiller, Scorer):
            raise ScoringError("this backend cannot give the log-probabilities of a prompt")
        request = self._make_request(prompt, params, sink)
        request.constraint = constraint
        stream = self._tokenizer.stream(skip_special_tokens=not keep_markers)
        sequence = Sequence(
            request=request,
            blocks=self._scheduler.blocks.new_sequence(),
            assembler=TextAssembler(stream, params.stop),
        )
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            if len(self._arrived) + len(self._scheduler.waiting) >= self._queue + self._scheduler.free_slots:
                raise QueueFullError(f"{self._queue} requests are waiting already; try again later")
            self._arrived.append(sequence)
        self._interrupt.set()
        return request

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is. Does nothing for one that has ended."""
        with self._lock:  # the call is told before its steps are counted: a thread may be stopped in between
            self._interrupt.set()
            self._cancelled.setdefault(request, self.counters.steps)

    def _make_request(self, prompt: Seq[int], params: SamplingParams, sink: OutputSink) -> Request:
        if not prompt:
            raise PromptError("the prompt has no tokens; give at least one")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise PromptError(
                f"the prompt holds ids that are no tokens: give ids from 0 to {self.vocab_size - 1}"
            )
        params.check_vocabulary(self.vocab_size)
        left = self.max_context - len(prompt)
        least = 0 if params.max_tokens == 0 else 1
        if left < least or (params.max_tokens or 0) > left:
            raise ContextLengthError(limit=self.max_context, prompt=len(prompt), requested=params.max_tokens)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self._tokenizer.eos_token_ids)
        request = Request(
            prompt=list(prompt),
            params=params,
            sink=sink,
            max_tokens=left if params.max_tokens is None else params.max_tokens,
            stop_token_ids=frozenset(stops),
        )
        if params.seed is not None:
            request.seed = params.seed
        return request

    # The engine's thread.

    def rehearse(self) -> None:
        """Have the first prompts and steps take no longer than later ones, and learn what prompts cost."""
        # Steps come first: prompts then find out whether what memory is left is enough for the largest pass.
        if isinstance(self._backend, RehearsingSteps):
            self._backend.rehearse_steps()
        pace = self._scheduler.pace
        if isinstance(self._prefiller, Rehearsing):
            for tokens, seconds in self._prefiller.rehearse(tokens=pace.most, context=self.max_context):
                pace.observe(prompt_tokens=tokens, prefill=seconds, decode=0.0, steps=0, rows=0)

    def step(self) -> bool:
        """Run one step for everybody. False if there was nothing to do."""
        plan = self.schedule()
        for sampled in self.run(plan):
            self.postprocess(plan, sampled)
        self.reclaim()
        return bool(plan) or bool(self._live)

    def schedule(self) -> Plan:
        """Take in what arrived and was cancelled, and decide what runs."""
        self._interrupt.clear()
        with self._lock:
            arrived, self._arrived = self._arrived, collections.deque()
            cancelled, self._cancelled = self._cancelled, {}
            self._scheduler.waiting.extend(arrived)
        for sequence in arrived:
            self._live[sequence.request] = sequence
        for request, steps in cancelled.items():
            self._drop(request, steps)
        plan = self._scheduler.schedule()
        for sequence in plan.filled:
            self._end(sequence)
            sequence.request.sink(Output("", (), finish_reason=FinishReason.LENGTH))
        return plan

    def run(self, plan: Plan) -> Iterator[Seq[Sampled | None]]:
        """The plan's chunks, then its rows; yields what the rows made, step by step, those that feed last."""
        start = time.perf_counter()
        prompt_tokens, prefill = self._fill(plan)
        prefilled = time.perf_counter()
        steps = 0
        if rows := plan.rows + plan.fed:
            for sampled in self._backend.run(rows, plan.steps, self._interrupt):
                steps += 1
                yield sampled
        decode = time.perf_counter() - prefilled
        self._scheduler.pace.observe(
            prompt_tokens=prompt_tokens,
            prefill=prefill,
            decode=decode,
            steps=steps,
            rows=len(rows),
        )
        self.counters.prefilled_tokens += prompt_tokens + len(plan.fed)
        self.counters.riding_tokens += len(plan.fed)
        self.counters.prefill_seconds += prefilled - start
        self.counters.decode_seconds += decode

    def _fill(self, plan: Plan) -> tuple[int, float]:
        """Feed the plan's chunks, or run layers of a pass over those of an earlier one. Gives how many tokens
        are computed by that, and the seconds that these took in all."""
        pairs = list(zip(plan.chunks, plan.chunk_owners, strict=True))
        filling = plan.filling
        if plain := [pair for pair in pairs if not pair[1].request.wants_scores]:
            filling = Filling.of(self._prefiller, *zip(*plain, strict=True))
        rows = len(plan.rows) + len(plan.fed)
        tokens, seconds = self._run_layers(filling, rows) if filling else (0, 0.0)
        for span, sequence in pairs:
            if sequence.request.wants_scores:
                begun = time.perf_counter()
                self._score(span, sequence)
                tokens += len(span.tokens)
                seconds += time.perf_counter() - begun
        return tokens, seconds

    def _run_layers(self, filling: Filling, rows: int) -> tuple[int, float]:
        """As `_fill`, of one pass before a step of so many rows."""
        pace = self._scheduler.pace
        complete = filling.run(pace.layers(filling, rows=rows))
        seconds = pace.observe_part(filling)
        logger.debug("%s, before a step of %d rows. %s", filling, rows, pace)
        self._scheduler.filling = None if complete else filling
        return (filling.tokens, seconds) if complete else (0, 0.0)

    def _score(self, span: Span, sequence: Sequence) -> None:
        """Feed a chunk whose tokens' log-probabilities are asked for."""
        assert isinstance(self._prefiller, Scorer)
        sequence.computed = span.end
        if not score_chunk(self._prefiller, span, sequence.request):
            self._give_up(sequence)

    def postprocess(self, plan: Plan, sampled: Seq[Sampled | None]) -> None:
        """Append each row's token, end those that are done, and tell whoever waits."""
        rows = sum(item is not None for item in sampled)
        for sequence in plan.fed_owners:
            sequence.computed += 1
        answers = sampled[: len(plan.row_owners)]  # what follows a token that was fed is known
        for sequence, item in zip(plan.row_owners, answers, strict=True):
            if item is not None and not sequence.ended:
                sequence.computed += 1
                self._append(sequence, item)
        self.counters.count_step(rows)

    def reclaim(self) -> None:
        """Free the blocks that the call now over was the last to read."""
        self._scheduler.reclaim()

    def fail(self, message: str) -> None:
        """End every request with an error; the engine is of no use afterwards."""
        with self._lock:
            self._dead = message
            sequences = [*self._live.values(), *self._arrived]
            self._arrived.clear()
        for sequence in sequences:
            try:
                sequence.request.sink(Output("", (), finish_reason=FinishReason.ERROR, error=message))
            except Exception:  # it may be why the engine failed; the others are to be told all the same
                logger.exception(
                    "request %d could not be told that the engine has ended", sequence.request.id
                )
        self._live.clear()

    def check(self) -> None:
        """Raise RuntimeError if a block or slot has leaked."""
        self._scheduler.check()

    @property
    def kv_use(self) -> dict[str, KVUse]:
        """What becomes of the blocks of each group. Any thread; it looks through the block tables."""
        pools, running = self._scheduler.blocks.pools, list(self._scheduler.running)
        use = {}
        for group, pool in pools.items():
            held: set[int] = {NO_BLOCK}.union(*(sequence.blocks.tables[group] for sequence in running))
            use[group.value] = KVUse(total=pool.size, free=pool.free, held=len(held) - 1)
        return use

    @property
    def state(self) -> EngineState:
        scheduler = self._scheduler
        return EngineState(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._arrived),
            preemptions=scheduler.preemptions,
            free_blocks={group.value: pool.free for group, pool in scheduler.blocks.pools.items()},
        )

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        request = sequence.request
        token = sampled.token
        if token == NO_TOKEN:
            self._give_up(sequence)
            return
        request.output.append(token)
        self.counters.generated_tokens += 1
        if request.constraint is not None:
            request.constraint.accept(token)
        reason: FinishReason | None = None
        text = ""
        if token in request.stop_token_ids:
            reason = FinishReason.STOP
        else:
            text, stopped = sequence.assembler.push_token(token)
            if stopped:
                reason = FinishReason.STOP
            elif len(request.output) >= request.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += sequence.assembler.finish()
            self._end(sequence)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        request.sink(Output(text, (token,), logprobs, reason))

    def _give_up(self, sequence: Sequence) -> None:
        """End a request for which the model gives no numbers; the others know nothing of it."""
        request = sequence.request
        sequence.unusable = True
        self._end(sequence)
        made = len(request.output)
        logger.error("request %d: logits that are not finite after %d tokens", request.id, made)
        text = sequence.assembler.finish()
        request.sink(Output(text, (), finish_reason=FinishReason.ERROR, error=UNUSABLE.format(made=made)))

    def _drop(self, request: Request, steps: int) -> None:
        """Cancel a request that is known and has not ended; `steps` had been run when that was asked for."""
        sequence = self._live.get(request)
        if sequence is None:
            return
        if sequence.slot == NO_SLOT:
            self._scheduler.remove_waiting(sequence)
        self._end(sequence)
        self.counters.count_cancellation(steps_before=steps)
        request.sink(Output("", (), finish_reason=FinishReason.CANCELLED))
        self.reclaim()

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        del self._live[sequence.request]
