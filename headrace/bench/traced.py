"""A launch at a model's sizes that records what every SM does, and what the recording costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from headrace.bench.decode import Method, Pool, check_room, hopper, measure
from headrace.bench.points import Point
from headrace.kernel.build import build_all
from headrace.kernel.launcher import Launcher
from headrace.kernel.pool import capacity_for
from headrace.kernel.trace import Trace
from headrace.kernel.variant import variant_of
from headrace.model.config import ModelConfig
from headrace.model.kv import blocks_for
from headrace.model.progress import Progress
from headrace.step.isa import Opcode
from headrace.step.limit import bytes_by_operation
from headrace.step.pack import pack_synthetic
from headrace.step.planner import build_plan


@dataclass(frozen=True)
class Traced:
    """The trace of one launch, the bytes that each operation reads in a step, and median milliseconds a step
    with and without recording.
    """

    trace: Trace
    read: Mapping[Opcode, float]
    recording: float
    plain: float

    @property
    def cost(self) -> float:
        """What part of a step's time the recording adds."""
        return self.recording / self.plain - 1


def trace_decode(
    config: ModelConfig,
    point: Point,
    *,
    method: Method,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Traced:
    """Run both kernels on this machine's GPU with random weights and KV of noise; the last launch is traced.

    Raises BenchError where it cannot be done; VariantError and BuildError of the kernel.
    """
    hopper()
    check_room(config, [point], method, torch.cuda.mem_get_info()[0])
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = build_plan(config, rows=capacity_for(point.rows), sms=sms)
    build_all([variant_of(plan, trace=trace) for trace in (False, True)], progress=tell)
    weights = pack_synthetic(config, seed=method.seed, device="cuda", dtype=torch.bfloat16, progress=progress)
    torch.cuda.empty_cache()
    pool = Pool(config, [point], method, "cuda")
    tables = pool.tables(point)
    blocks = blocks_for(max(point.contexts) + method.steps)
    medians = []
    for trace in (False, True):
        kernel = Launcher(plan, weights, pool.cache, table_blocks=blocks, trace=trace)
        found = measure(config, point, tables, kernel, bandwidth=1.0, method=method)
        medians.append(statistics.median(found.milliseconds))
    middle = (method.steps - 1) / 2  # of a launch's steps, whose rows move on by one position each
    positions = [context - 1 + middle for context in point.contexts]
    read = bytes_by_operation(config, positions, found.experts)
    return Traced(kernel.traced(), read, medians[1], medians[0])
