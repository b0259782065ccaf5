"""How long-running work here tells a front end how far it is. The front end decides how to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Told about one task at a time: `start`, some `advance`, `finish`. `total` and `amount` are bytes."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...

    def finish(self) -> None: ...


@contextmanager
def tracked(progress: Progress | None, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A task of `total` bytes; gives the function to call with the bytes just done. None: nobody watches."""
    if progress is None:
        yield lambda amount: None
        return
    progress.start(what, total)
    try:
        yield progress.advance
    finally:
        progress.finish()
