"""What is known of one HTTP request while it runs, for its line in the log and for the metrics.

The middleware in `request_log.py` makes a Record for every request and leaves it in `current`; those who
learn something about the request (what it submitted, what went wrong, that its client left) write it there.
All of this happens on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace.engine.request import Request


@dataclass(slots=True)
class Timing:
    """How one answer went. Times are seconds on the monotonic clock; None: not yet.

    `first` and `last` are when its first and its newest token reached the event loop. `tokens` are those that
    were told to the client, `finish_reason` is what it was told.
    """

    request: Request
    arrival: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    finish_reason: str | None = None

    @property
    def queued(self) -> float | None:
        """Seconds from the submission until the engine took the request in."""
        admitted = self.request.admitted
        return None if admitted is None else admitted - self.request.arrival


@dataclass(slots=True)
class Record:
    """One request. `error` is the kind of error that it ended with, `gone`: its client left before the end.

    `prompt_tokens` counts each prompt once, however many answers it gets (`choices`).
    """

    id: str
    method: str
    path: str
    arrival: float = field(default_factory=time.monotonic)
    status: int | None = None
    streamed: bool = False
    error: str | None = None
    gone: bool = False
    prompt_tokens: int | None = None
    choices: int = 1
    timings: Sequence[Timing] = ()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were not computed again."""
        return sum(timing.request.cached_tokens for timing in self.timings[:: self.choices])


current: ContextVar[Record | None] = ContextVar("current", default=None)


def arrival() -> float:
    """When the request under way came in; now, if there is none."""
    record = current.get()
    return time.monotonic() if record is None else record.arrival


def note_submitted(timings: Sequence[Timing], *, prompt_tokens: int, choices: int) -> None:
    """The request under way has gone to the engine."""
    if (record := current.get()) is not None:
        record.timings, record.prompt_tokens, record.choices = timings, prompt_tokens, choices


def note_error(kind: str) -> None:
    """The client of the request under way is told of an error."""
    if (record := current.get()) is not None:
        record.error = kind


def note_gone() -> None:
    """The client of the request under way has left."""
    if (record := current.get()) is not None:
        record.gone = True
