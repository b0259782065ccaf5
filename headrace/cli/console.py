"""The terminal: answers go to stdout; everything about them (progress, figures, refusals) to stderr."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class RefusedError(Exception):
    """What was asked for cannot be done; the message says, in a sentence, what to do instead."""


def check_folders(*files: Path | None) -> None:
    """Raise RefusedError where a file would lack its folder, or is one: asked before work that takes long."""
    for file in filter(None, files):
        if file.is_dir():
            raise RefusedError(f"{file} is a folder: name a file in it")
        if not file.absolute().parent.is_dir():
            raise RefusedError(f"there is no folder {file.absolute().parent} for {file.name}: make it first")


def refuse(message: str) -> None:
    """Print why nothing was done."""
    err.print(f"[bold red]headrace:[/] {escape(message)}", soft_wrap=True)


def configure_logging() -> None:
    """Log warnings and worse to stderr."""
    handler = RichHandler(console=err, show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)


def configure_server_logging(*, debug: bool = False) -> None:
    """Log to stderr in plain lines with their time, those of the server about each request among them.

    `debug`: those of the engine about each part of a prompt, too.
    """
    handler = logging.StreamHandler()
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)


class Bars:
    """A bar for each task of the model's code (`headrace.model.progress.Progress`), one after another."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def start(self, what: str, total: int) -> None:
        self._bars.start()  # not before: an empty display would leave an empty line
        self._task = self._bars.add_task(what, total=total)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def finish(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


@contextlib.contextmanager
def progress_bars() -> Iterator[Bars]:
    """Bars that count bytes, on stderr, gone when the work is done; none where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    # Where stderr is a file, all that would come of bars is an empty line at their end.
    bars = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    try:
        yield Bars(bars)
    finally:
        bars.stop()


def say_rate(tokens: int, seconds: float) -> None:
    """Print how fast an answer came."""
    rate = tokens / seconds if seconds > 0 else 0.0
    err.print(f"[dim]{tokens} tokens in {seconds:.1f} s, {rate:.1f} tokens/s[/]")
