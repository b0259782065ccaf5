"""Threads for work that may take minutes and cannot be stopped."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """`count` threads at most, started as they are needed.

    In the event loop's own pool such work would take the threads that prompts are rendered on, and be waited
    for when the server ends. These are daemons: the end of the process is theirs.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """What `work` gives, once a thread has had time for it; while it waits it can be cancelled.

        Called on one thread only.
        """
        future: Future[T] = Future()
        self._jobs.put((future, work))
        if len(self._threads) < self._count:
            self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()
        return future

    def _run(self) -> None:
        while True:
            future, work = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del future, work  # no hold of what they refer to while this waits for the next
