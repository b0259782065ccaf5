"""The decode megakernel as the engine's decode backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headrace.engine.backend import DecodeBackend, DecodeRow, Interrupt, takes_constraints
from headrace.model.sampler import Sampled
from headrace.step.oracle.rows import LaunchRow

MAX_STEPS = 16  # of a launch


class Launches(Protocol):
    """A kernel: `headrace.kernel.launcher.Launcher` is one."""

    def launch(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool]
    ) -> Iterator[list[int | None]]: ...


class Kernels(Protocol):
    """Kernels of all row capacities: `headrace.kernel.pool.KernelPool` is one."""

    def prepare(self) -> None: ...

    def launcher(self, rows: int) -> Launches: ...


class KernelBackend:
    """Decodes greedy rows with the kernel of the smallest row capacity that holds them.

    A call with a row that is drawn, changed by penalties or a bias, held to a constraint, or that asks for
    log-probabilities goes to `others`, which works on the same KV pages: the kernel has none of these yet.
    """

    name = "kernel"

    def __init__(self, kernels: Kernels, others: DecodeBackend, *, max_rows: int, max_steps: int) -> None:
        self.max_rows = max_rows
        self.max_steps = min(max_steps, MAX_STEPS)
        self.takes_constraints = takes_constraints(others)
        self._kernels = kernels
        self._others = others

    def prepare(self) -> None:
        """Compile the kernels, or take them from the cache."""
        self._kernels.prepare()
        self._others.prepare()

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        if not all(is_plain(row) for row in rows):
            yield from self._others.run(rows, steps, interrupt)
            return
        launcher = self._kernels.launcher(len(rows))
        for tokens in launcher.launch([launch_row(row) for row in rows], steps, interrupt.is_set):
            yield [None if token is None else Sampled(token) for token in tokens]


def is_plain(row: DecodeRow) -> bool:
    """Whether the kernel can sample this row: greedy, from the logits as they are, with nothing to report."""
    params = row.params
    return (
        params.is_greedy and not params.changes_logits and params.logprobs is None and row.constraint is None
    )


def launch_row(row: DecodeRow) -> LaunchRow:
    """The row as a launch takes it."""
    return LaunchRow(
        slot=row.slot,
        token=row.token,
        position=row.position,
        tables=row.tables,
        params=row.params,
        seed=row.seed,
        prompt=row.prompt,
        output=row.output,
        max_tokens=row.max_tokens,
        stop_token_ids=row.stop_token_ids,
    )
