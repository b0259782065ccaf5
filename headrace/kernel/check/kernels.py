"""The kernel as comparisons see it, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from headrace.kernel.launcher import Launcher
from headrace.model.kv import KVCache
from headrace.step.isa import Buffer
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan

Rows = Sequence[LaunchRow | None]
Tokens = Sequence[int | None]


class Kernel(Protocol):
    """`headrace.kernel.launcher.Launcher` is one, and says what these do."""

    def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]: ...

    def buffer(self, buffer: Buffer) -> Tensor: ...

    def poison(self) -> None: ...


# From a plan, weights, KV pages of its own, the blocks of the longest table, and whether it goes by the book.
MakeKernel = Callable[[Plan, PackedWeights, KVCache, int, bool], Kernel]


def on_gpu(plan: Plan, weights: PackedWeights, cache: KVCache, table_blocks: int, strict: bool) -> Launcher:
    """The real one."""
    return Launcher(plan, weights, cache, table_blocks=table_blocks, strict=strict)


def logits_of(kernel: Kernel, plan: Plan) -> Tensor:
    """Of the last step: [R, vocabulary], a copy."""
    sizes = plan.sizes
    tiles = kernel.buffer(Buffer.LOGITS).permute(1, 0, 2)
    return tiles.reshape(sizes.rows, -1)[:, : sizes.vocabulary].clone()


def advanced(rows: Rows, tokens: Tokens) -> list[LaunchRow | None]:
    """The rows one step on."""
    return [
        None if row is None or token is None else replace(row, token=token, position=row.position + 1)
        for row, token in zip(rows, tokens, strict=True)
    ]
