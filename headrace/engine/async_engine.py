"""The engine on a thread of its own, for callers on other threads and in event loops."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
from collections.abc import AsyncIterator, Sequence

from headrace.engine.engine import Engine, EngineState
from headrace.engine.request import EngineError, Output, OutputSink, Request
from headrace.model.sampling import SamplingParams

logger = logging.getLogger(__name__)


class EngineDeadError(EngineError):
    """The engine's thread has ended, by an error or because it was closed; the server must be restarted."""


class AsyncEngine:
    """Calls `engine.step()` while there is work and sleeps otherwise.

    An exception on that thread ends every request with an error and the engine with it: `error` says why.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._work = False
        self._closed = False
        self.error: str | None = None
        self._thread = threading.Thread(target=self._loop, name="headrace-engine", daemon=True)

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    @property
    def state(self) -> EngineState:
        return self._engine.state

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the step under way; requests that have not ended end with an error."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, prompt: Sequence[int], params: SamplingParams, sink: OutputSink) -> Request:
        """Queue a request; `sink` gets its outputs on the engine's thread. Raises EngineError."""
        self._require_alive()
        request = self._engine.submit(prompt, params, sink)
        self._notify()
        return request

    def cancel(self, request: Request) -> None:
        """End a request within one step. Does nothing for one that has ended."""
        self._engine.cancel(request)
        self._notify()

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[Output]:
        """The request's outputs as they come. Leaving the iteration early cancels the request.

        Raises EngineError before the first output if the request cannot be taken.
        """
        queue: asyncio.Queue[Output] = asyncio.Queue()
        mailbox = Mailbox(asyncio.get_running_loop(), queue)
        request = self.submit(prompt, params, mailbox.post)
        try:
            while True:
                output = await queue.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.cancel(request)

    def _notify(self) -> None:
        with self._wake:
            self._work = True
            self._wake.notify()

    def _require_alive(self) -> None:
        if not self.alive or self._closed:
            raise EngineDeadError(self.error or "the engine is not running")

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                while not self._closed and self._engine.step():
                    pass
                if not self._closed:
                    self._engine.check()
        except Exception as error:
            logger.exception("the engine failed")
            self.error = f"the engine failed: {error}"
        self._engine.fail(self.error or "the server is shutting down")

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do. False once the engine has been closed."""
        with self._wake:
            while not self._work and not self._closed:
                self._wake.wait()
            self._work = False
            return not self._closed


class Mailbox:
    """Carries outputs from the engine's thread into an event loop, with one wake-up for all that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Output]) -> None:
        self._loop = loop
        self._queue = queue
        self._pending: collections.deque[Output] = collections.deque()

    def post(self, output: Output) -> None:
        """Called on the engine's thread."""
        first = not self._pending
        self._pending.append(output)
        if first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop has closed: nobody listens any more
                self._pending.clear()

    def _deliver(self) -> None:
        while self._pending:
            self._queue.put_nowait(self._pending.popleft())
