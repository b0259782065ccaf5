"""The engine on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from headrace.engine.counters import Counters
from headrace.engine.engine import Engine, EngineState, KVUse
from headrace.engine.request import EngineDeadError, OutputSink, Request
from headrace.model.constraint import Constraint
from headrace.model.sampling import SamplingParams

logger = logging.getLogger(__name__)

_CLOSED = "the engine is shutting down"


class AsyncEngine:
    """Calls `engine.step()` while there is work and sleeps otherwise.

    Whatever is raised on that thread ends every request with an error and the engine with it: `error` says
    why.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._work = False
        self._closed = False
        self._rehearses = False
        self._ready = threading.Event()
        self.error: str | None = None
        self._thread = threading.Thread(target=self._loop, name="headrace-engine", daemon=True)

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    @property
    def unready(self) -> str | None:
        """Why requests cannot be served now; None when they can."""
        if self.error is not None:
            return self.error
        if self._closed:
            return _CLOSED
        return None if self._ready.is_set() and self._thread.is_alive() else "the engine has not started yet"

    @property
    def dead(self) -> bool:
        """Whether it has ended, and will serve nothing any more."""
        return self.error is not None or (self._thread.ident is not None and not self._thread.is_alive())

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    @property
    def kv_use(self) -> dict[str, KVUse]:
        return self._engine.kv_use

    def start(self, *, rehearse: bool = False) -> None:
        """Returns once requests can be served, as fast as later ones if `rehearse`: seconds on a GPU.

        Raises EngineDeadError if that failed.
        """
        self._rehearses = rehearse
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            raise EngineDeadError(self.error)

    def close(self) -> None:
        """Stop after the step under way; requests that have not ended end with an error."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.ident is None:  # never started: nobody else would tell those who wait
            self._engine.fail(_CLOSED)
        elif self._thread.is_alive():
            self._thread.join()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        *,
        keep_markers: bool = False,
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a request; `sink` gets its outputs on the engine's thread. As Engine.submit."""
        request = self._engine.submit(prompt, params, sink, keep_markers=keep_markers, constraint=constraint)
        self._notify()
        return request

    def cancel(self, request: Request) -> None:
        """End a request within one step. Does nothing for one that has ended."""
        self._engine.cancel(request)
        self._notify()

    def _notify(self) -> None:
        with self._wake:
            self._work = True
            self._wake.notify()

    def _loop(self) -> None:
        try:
            if self._rehearses:
                self._engine.rehearse()
            self._ready.set()
            while self._wait_for_work():
                while not self._closed and self._engine.step():
                    pass
                if not self._closed:
                    self._engine.check()
        except BaseException as error:  # a panic in a library written in Rust is no Exception
            logger.exception("the engine failed")
            self.error = f"the engine failed: {error}"
        self._ready.set()
        self._engine.fail(self.error or _CLOSED)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do. False once the engine has been closed."""
        with self._wake:
            while not self._work and not self._closed:
                self._wake.wait()
            self._work = False
            return not self._closed
