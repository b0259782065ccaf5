"""The kernel against the oracle, buffer by buffer; and what must not change its bits.

A small model of North's shape, on which the oracle takes half a second a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.check.kernels import Kernel, MakeKernel, Rows, Tokens, advanced, logits_of, on_gpu
from headrace.model.config import ModelConfig
from headrace.model.kv import KVCache
from headrace.step.buffers import buffer_specs
from headrace.step.isa import Buffer
from headrace.step.oracle.machine import Oracle
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.world import World, north, tokens_of
from headrace.step.pack import pack_model
from headrace.step.plan import Plan
from headrace.step.planner import build_plan

COMPARED = (
    Buffer.X,
    Buffer.QKV,
    Buffer.PARTIALS,
    Buffer.ATTENTION_OUT,
    Buffer.ROUTER_LOGITS,
    Buffer.HIDDEN,
)
BOUND = 0.01  # relative error of a buffer: a few roundings to bfloat16, through three layers
ROW_BOUND = 0.03  # of a row of a buffer: in short sums roundings do not average out
MARGIN = 0.03  # between the two largest logits, in their standard deviations: nearer, roundings decide

# Lengths of the sequences: pages' edges and the window's; capacity; which place of the launch stays empty.
SETTINGS: list[tuple[list[int], int, int | None]] = [
    ([130], 1, None),
    ([64, 65], 2, None),
    ([1, 64, 200], 4, 1),
    ([130, 1, 65, 70, 64, 3, 127], 8, None),
    ([1, 64, 65, 130, 63, 71, 5, 128, 129, 100], 16, 3),
]


class Bench:
    """A small model with sequences of given lengths, for the oracle and for kernels."""

    def __init__(
        self,
        lengths: Sequence[int],
        rows: int,
        hole: int | None = None,
        *,
        config: ModelConfig | None = None,
        world: type[World] = World,
        make: MakeKernel = on_gpu,
        device: str = "cuda",
        sms: int = 132,
    ) -> None:
        self.world = world(config or north(), lengths, dtype=torch.bfloat16)
        self.plan = build_plan(self.world.config, rows=rows, sms=sms)
        self.rows: list[LaunchRow | None] = list(self.world.rows())
        if hole is not None:
            self.rows.insert(hole, None)
        self.live = [index for index, row in enumerate(self.rows) if row is not None]
        self._make, self._device = make, device

    def kernel(self, *, plan: Plan | None = None, strict: bool = False) -> Kernel:
        """A kernel with KV pages of its own, in which all that no token was written to is NaN."""
        packed = pack_model(self.world.model, device=self._device, dtype=torch.bfloat16)
        cache = KVCache(self.world.config, self.world.cache.blocks, dtype=torch.bfloat16, device=self._device)
        for pages, poisoned in zip(cache.pages, self.world.poisoned().pages, strict=True):
            pages.copy_(poisoned)
        blocks = max(len(table) for one in self.world.sequences for table in one.tables.values())
        return self._make(plan or self.plan, packed, cache, blocks, strict)

    def oracle(self) -> Oracle:
        return self.world.oracle_of(self.plan)

    def logits(self, kernel: Kernel) -> Tensor:
        """Of the live rows: [rows, vocabulary]."""
        return logits_of(kernel, self.plan)[self.live].cpu()


def error(ours: Tensor, right: Tensor) -> float:
    """Relative, over what the oracle has written; NaN where we have not."""
    written = ~torch.isnan(right)
    return float((ours[written] - right[written]).norm() / right[written].norm())


def left_by(kernel: Kernel, oracle: Oracle, live: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Every buffer that both left of the live rows, and the logits: ours and what is right, float32."""
    pairs = {}
    for buffer in (*COMPARED, Buffer.SHARED_HIDDEN):
        if buffer not in buffer_specs(oracle.plan.sizes):  # a model that has no such layers
            continue
        right = torch.from_numpy(np.asarray(oracle.buffer(buffer), dtype=np.float32))
        ours = kernel.buffer(buffer).float().cpu()
        rows: tuple[Any, ...] = (slice(None), live)
        if buffer is Buffer.PARTIALS:
            sizes = oracle.plan.sizes
            rows = (live, ..., slice(sizes.group * (sizes.head_dim + 2)))  # what follows is for alignment
        pairs[buffer.name] = (ours[rows], right[rows])
    logits = logits_of(kernel, oracle.plan)[live].cpu()
    return pairs | {"LOGITS": (logits, torch.from_numpy(oracle.logits()[live]))}


def buffer_errors(bench: Bench, kernel: Kernel, oracle: Oracle) -> dict[str, float]:
    """Of every buffer that both left behind, and of the logits."""
    return {name: error(*pair) for name, pair in left_by(kernel, oracle, bench.live).items()}


def row_errors(bench: Bench) -> dict[str, float]:
    """Of the buffers that one step leaves, in each the largest error of a row. To be at most ROW_BOUND."""
    oracle, kernel = bench.oracle(), bench.kernel()
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    errors = {}
    for name, pair in left_by(kernel, oracle, bench.live).items():
        axis = 0 if name in (Buffer.PARTIALS.name, "LOGITS") else 1
        rows = zip(*(side.unbind(axis) for side in pair), strict=True)
        errors[name] = worst({str(row): error(*both) for row, both in enumerate(rows)})
    return errors


def step_errors(bench: Bench, *, strict: bool = False) -> dict[str, float]:
    """Of the buffers that one step leaves. To be at most BOUND."""
    oracle, kernel = bench.oracle(), bench.kernel(strict=strict)
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    return buffer_errors(bench, kernel, oracle)


def worst(errors: dict[str, float]) -> float:
    """The largest; NaN if there is one."""
    return math.nan if any(math.isnan(value) for value in errors.values()) else max(errors.values())


def parting_margin(bench: Bench, steps: int = 6) -> float:
    """The largest margin at which a row's token was another than the oracle's; 0 if none was. At most MARGIN.

    A row is followed until it parts. Infinite if not one row came to the end, or a step is missing: then
    nothing was compared.
    """
    oracle = bench.oracle()
    made = list(bench.kernel().launch(bench.rows, steps))
    if len(made) != steps:
        return math.inf
    fed: Rows = bench.rows
    following, margin = set(bench.live), 0.0
    for tokens in made:
        (sampled,) = oracle.launch(fed, 1)
        right, logits = tokens_of(sampled), np.sort(oracle.logits(), axis=1)
        for index in list(following):
            if tokens[index] != right[index]:
                here = (logits[index, -1] - logits[index, -2]) / logits[index].std()
                margin = max(margin, float(here))
                following.remove(index)
        fed = advanced(fed, right)
    return margin if following else math.inf


def run(kernel: Kernel, rows: Rows, steps: int, *, at_once: bool) -> list[Tokens]:
    """The tokens of steps in one launch, or in a launch each with all buffers poisoned before it."""
    if at_once:
        return list(kernel.launch(rows, steps))
    made = []
    for _ in range(steps):
        kernel.poison()
        (tokens,) = kernel.launch(rows, 1)
        made.append(tokens)
        rows = advanced(rows, tokens)
    return made


def changed_by_launches(bench: Bench, steps: int = 16) -> int:
    """How many tokens and logits differ between steps at once, one by one, and by the book. To be 0."""
    first = bench.kernel()
    tokens = run(first, bench.rows, steps, at_once=True)
    changed = 0
    for strict, at_once in ((False, False), (True, True), (False, True)):
        other = bench.kernel(strict=strict)
        again = run(other, bench.rows, steps, at_once=at_once)
        changed += sum(ours != right for ours, right in zip(again, tokens, strict=True))
        changed += different(bench.logits(other), bench.logits(first))
    return changed


def changed_by_others(bench: Bench, steps: int = 4) -> int:
    """How many logits of the last row differ when it is alone. To be 0."""
    together, alone = bench.kernel(), bench.kernel()
    list(together.launch(bench.rows, steps))
    last = bench.live[-1]
    list(alone.launch([row if index == last else None for index, row in enumerate(bench.rows)], steps))
    return different(bench.logits(alone)[-1], bench.logits(together)[-1])


def changed_by_capacity(benches: Sequence[Bench], steps: int = 4) -> int:
    """How many logits differ between kernels of several capacities that run the same row. To be 0."""
    logits = []
    for bench in benches:
        kernel = bench.kernel()
        list(kernel.launch(bench.rows, steps))
        logits.append(bench.logits(kernel))
    return sum(different(other, logits[0]) for other in logits[1:])


def different(one: Tensor, other: Tensor) -> int:
    """Elements that are not the same number; one that is no number differs from all."""
    return int((one != other).sum())
