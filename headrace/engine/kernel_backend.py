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

    A row that is drawn, changed by penalties or a bias, held to a constraint, or that asks for
    log-probabilities goes to `others`, which works on the same KV pages: the kernel has none of these yet.
    Who takes a row depends on that row alone, so its neighbours do not change its tokens.
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
        own = [index for index, row in enumerate(rows) if is_plain(row)]
        if len(own) == len(rows):
            yield from self._launch(rows, steps, interrupt)
        elif not own:
            yield from self._others.run(rows, steps, interrupt)
        else:
            yield self._mixed(rows, own, interrupt)

    def _launch(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        launcher = self._kernels.launcher(len(rows))
        for tokens in launcher.launch([launch_row(row) for row in rows], steps, interrupt.is_set):
            yield [None if token is None else Sampled(token) for token in tokens]

    def _mixed(
        self, rows: Sequence[DecodeRow], own: Sequence[int], interrupt: Interrupt
    ) -> Sequence[Sampled | None]:
        """One step, as the two cannot take turns within a launch: the kernel's rows, then the others."""
        made: list[Sampled | None] = [None] * len(rows)
        rest = [index for index in range(len(rows)) if index not in own]
        for run, part in ((self._launch, own), (self._others.run, rest)):
            for sampled in run([rows[index] for index in part], 1, interrupt):
                for index, item in zip(part, sampled, strict=True):
                    made[index] = item
        return made


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
