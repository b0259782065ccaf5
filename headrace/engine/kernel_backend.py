"""The decode megakernel as the engine's decode backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.kernel.launcher import MAX_STEPS
from headrace.model.sampler import Sampled
from headrace.step.oracle.rows import LaunchRow


class Launches(Protocol):
    """A kernel: `headrace.kernel.launcher.Launcher` is one."""

    def run(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool]
    ) -> Iterator[list[Sampled | None]]: ...


class Kernels(Protocol):
    """Kernels of all row capacities: `headrace.kernel.pool.KernelPool` is one."""

    def prepare(self) -> None: ...

    def rehearse(self) -> None: ...

    def launcher(self, rows: int) -> Launches: ...


class KernelBackend:
    """Decodes rows with the kernel of the smallest row capacity that holds them.

    A call with a row that is held to a constraint takes one step: only the host knows the next mask.
    """

    name = "kernel"
    takes_constraints = True
    takes_several_rows = True

    def __init__(self, kernels: Kernels, *, max_rows: int, max_steps: int) -> None:
        self.max_rows = max_rows
        self.max_steps = min(max_steps, MAX_STEPS)
        self._kernels = kernels

    def prepare(self) -> None:
        """Compile the kernels, or take them from the cache."""
        self._kernels.prepare()

    def rehearse_steps(self) -> None:
        """As `headrace.engine.backend.RehearsingSteps` says."""
        self._kernels.rehearse()

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        if any(row.constraint is not None for row in rows):
            steps = 1
        launcher = self._kernels.launcher(len(rows))
        yield from launcher.run([launch_row(row) for row in rows], steps, interrupt.is_set)


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
        allowed=None if row.constraint is None else row.constraint.mask(),
    )
