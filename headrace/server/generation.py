"""The engine requests behind one HTTP request: several for n > 1 or several prompts, and one stream out."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headrace.engine.request import FinishReason, Output, OutputSink, Request
from headrace.model.constraint import Constraint
from headrace.model.sampling import SamplingParams, TokenLogprobs
from headrace.server.errors import ApiError
from headrace.server.record import Timing, arrival

IN_A_ROW = 16  # outputs of one request that may be told before others get the event loop


class Submitter(Protocol):
    """What is asked of the engine here; AsyncEngine provides it."""

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        *,
        keep_markers: bool = False,
        constraint: Constraint | None = None,
    ) -> Request: ...

    def cancel(self, request: Request) -> None: ...


@dataclass(slots=True)
class Answer:
    """Everything that one engine request gave."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason


class Mailbox:
    """Carries items from the engine's thread into an event loop, with one wake-up for all that wait.

    `seen` is called for each item when it gets there, whether somebody takes it soon or late.
    """

    def __init__(self, seen: Callable[[int, Output], None] = lambda index, output: None) -> None:
        self._seen = seen
        self._loop = asyncio.get_running_loop()
        self._posted: collections.deque[tuple[int, Output]] = collections.deque()
        self._woken = False
        self._arrived: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._in_a_row = 0

    def post(self, index: int, output: Output) -> None:
        """Called on the engine's thread."""
        self._posted.append((index, output))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # The flag falls before the drain: what is posted from here on either is drained or wakes again.
        self._woken = False
        while self._posted:
            item = self._posted.popleft()
            self._seen(*item)
            self._arrived.put_nowait(item)

    async def next(self) -> tuple[int, Output]:
        """The next item. Who takes many that lie here already does not keep the event loop from others.

        They gather where a client reads slowly. If it then leaves, nothing makes its answer wait any more,
        not even for the news that it has left.
        """
        if self._arrived.empty():
            self._in_a_row = 0
        elif self._in_a_row >= IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)
        self._in_a_row += 1
        return await self._arrived.get()


class Generation:
    """Requests that were submitted together and are cancelled together.

    Made on the event loop's thread; `constrain` makes the constraint of each job. Raises EngineError if the
    engine refuses one of them; none is then left behind in the engine. `on_token` is called with the timing
    of a job and the time, on the monotonic clock, for each of its tokens.
    """

    def __init__(
        self,
        engine: Submitter,
        jobs: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        keep_markers: bool = False,
        constrain: Callable[[], Constraint | None] = lambda: None,
        on_token: Callable[[Timing, float], None] = lambda timing, now: None,
    ) -> None:
        self._engine = engine
        self._on_token = on_token
        self._mailbox = Mailbox(self._seen)
        self._running: dict[int, Request] = {}
        self.size = len(jobs)
        self._requests: list[Request] = []
        self.timings: list[Timing] = []
        try:
            for index, (prompt, params) in enumerate(jobs):
                sink = partial(self._mailbox.post, index)
                request = engine.submit(
                    prompt, params, sink, keep_markers=keep_markers, constraint=constrain()
                )
                self._running[index] = request
                self._requests.append(request)
                self.timings.append(Timing(request, arrival()))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Free what is still running; does nothing when all is done."""
        for request in self._running.values():
            self._engine.cancel(request)
        self._running.clear()

    def end(self, index: int, reason: str) -> None:
        """One job's answer is complete, for `reason`; what it still makes is not heard of any more."""
        self.timings[index].finish_reason = reason
        if (request := self._running.pop(index, None)) is not None:
            self._engine.cancel(request)

    def cached_tokens(self, answers: int = 1) -> int:
        """Tokens of the prompts, each of `answers` jobs in a row, that were not computed again."""
        return sum(request.cached_tokens for request in self._requests[::answers])

    def prompt_logprobs(self, index: int) -> Sequence[TokenLogprobs]:
        """Of the tokens of a job's prompt from the second on, once its first output has come."""
        return self._requests[index].prompt_logprobs

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(index of the job, output) in the order in which the engine makes them, until all have finished.

        Raises ApiError when the engine fails on one of them. The caller cancels when it stops early.
        """
        while self._running:
            index, output = await self._mailbox.next()
            if index not in self._running:
                continue
            if output.finish_reason is not None:
                del self._running[index]
            if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                raise _failure(output)
            timing = self.timings[index]
            timing.tokens += len(output.token_ids)
            timing.finish_reason = output.finish_reason
            yield index, output

    def _seen(self, index: int, output: Output) -> None:
        if output.token_ids and index in self._running:
            self._on_token(self.timings[index], time.monotonic())

    async def collect(self) -> list[Answer]:
        """All answers in the order of the jobs; cancels what is running when it is itself cancelled."""
        answers = [Answer() for _ in range(self.size)]
        try:
            async for index, output in self.outputs():
                answers[index].add(output)
        finally:
            self.cancel()
        return answers


def _failure(output: Output) -> ApiError:
    if output.finish_reason is FinishReason.ERROR:
        message = f"The engine failed on this request: {output.error or 'its log says how'}"
        return ApiError(500, message, code="engine_error")
    return ApiError(503, "The request was cancelled by the server, which is shutting down.", code="cancelled")
