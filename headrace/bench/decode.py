"""How fast the decode kernel runs at a model's sizes, by the wall clock of the host's whole loop.

Weights are random, KV is noise, and both are made once for all settings. The router is the model's own, so
how many experts a step uses is what random weights make of it; the kernel counts them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from headrace.bench.points import Point
from headrace.bench.power import Power, Watch, nvidia_smi
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.hopper import has_hopper
from headrace.model.kv import NO_BLOCK, BlockTables, KVCache, block_bytes, blocks_for, first_visible_block
from headrace.model.memory import weight_bytes
from headrace.model.progress import Progress
from headrace.model.sampler import NO_TOKEN
from headrace.model.sampling import SamplingParams
from headrace.step.limit import StepBytes, step_bytes, uniform_experts
from headrace.step.oracle.rows import LaunchRow

# Bytes a second by datasheet, by how the device's name begins; the longest that fits counts.
BANDWIDTHS = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100": 3.35e12,
    "NVIDIA H100 NVL": 3.9e12,
    "NVIDIA H100 PCIe": 2.0e12,
}
SPREAD_AT_LEAST = 0.8  # of the experts that uniform routing would use: fewer, and the router has degenerated
_MARGIN = 4 << 30  # bytes of memory for all that is neither weights nor KV
_GREEDY = SamplingParams(temperature=0)


class BenchError(RuntimeError):
    """What was asked for cannot be measured here, or no measurement came out; the message says why."""


class Launches(Protocol):
    """A kernel: `headrace.kernel.launcher.Launcher` is one."""

    @property
    def experts_read(self) -> int: ...

    def launch(self, rows: Sequence[LaunchRow | None], steps: int) -> Iterator[list[int | None]]: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a setting is measured: after `warm_up` launches, `launches` of `steps` steps from the same place.

    Every launch begins with new random tokens: with random weights a row repeats its token, so its experts.
    """

    launches: int = 20
    warm_up: int = 3
    steps: int = 16
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting's result.

    `milliseconds` are a step's, one number a launch; `experts` are a step's over all layers. `power` is None
    where nobody watched.
    """

    point: Point
    milliseconds: tuple[float, ...]
    experts: float
    uniform: float
    read: StepBytes
    bandwidth: float
    power: Power | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> float:
        """The slowest launch's less the fastest's."""
        return max(self.milliseconds) - min(self.milliseconds)

    @property
    def tokens_per_second(self) -> float:
        return self.point.rows / self.median * 1e3

    @property
    def share(self) -> float:
        """Of the limit: what the bytes would take at the datasheet's bandwidth, over what the step took."""
        return self.read.share(self.median / 1e3, self.bandwidth)

    @property
    def spreads(self) -> bool:
        """Whether the router chose about as many experts as a uniform one would."""
        return self.experts >= SPREAD_AT_LEAST * self.uniform

    def as_json(self) -> dict[str, Any]:
        """As results files have it."""
        return {
            "rows": self.point.rows,
            "context": self.point.context,
            "ms_per_step": round(self.median, 4),
            "ms_spread": round(self.spread, 4),
            "tokens_per_s": round(self.tokens_per_second, 1),
            "bytes": round(self.read.total),
            "experts": round(self.experts, 2),
            "experts_if_uniform": round(self.uniform, 2),
            "share_of_limit": round(self.share, 4),
            "sm_clock_mhz": None if self.power is None else round(self.power.sm_clock_mhz),
            "power_w": None if self.power is None else round(self.power.watts, 1),
            "power_limited": None if self.power is None else self.power.limited,
            "vllm_tokens_per_s": None,
        }


class Pool:
    """KV pages full of noise, large enough for each of the points, and the tables of a point's rows."""

    def __init__(
        self, config: ModelConfig, points: Sequence[Point], method: Method, device: torch.device | str
    ) -> None:
        self._config, self._steps = config, method.steps
        self._random = random.Random(method.seed)
        self.cache = KVCache(
            config, pool_blocks(config, points, method.steps), dtype=torch.bfloat16, device=device
        )
        generator = torch.Generator(device=device).manual_seed(method.seed)
        for pages in self.cache.pages:
            pages.normal_(generator=generator)

    def tables(self, point: Point) -> list[BlockTables]:
        """A table for every row, of blocks scattered at random."""
        free = {
            group: self._random.sample(range(blocks), blocks) for group, blocks in self.cache.blocks.items()
        }
        return [
            {group: self._table(group, context, free[group]) for group in free} for context in point.contexts
        ]

    def _table(self, group: KVGroup, context: int, free: list[int]) -> list[int]:
        gone = _gone(self._config, group, context)
        return [NO_BLOCK] * gone + [free.pop() for _ in range(blocks_for(context + self._steps) - gone)]


def _gone(config: ModelConfig, group: KVGroup, context: int) -> int:
    """Blocks of a sequence that its last token no longer sees."""
    return first_visible_block(context - 1, config.window if group is KVGroup.SLIDING else None)


def pool_blocks(config: ModelConfig, points: Sequence[Point], steps: int) -> dict[KVGroup, int]:
    """How many blocks of each group the largest of the points needs."""
    return {
        group: max(
            sum(blocks_for(context + steps) - _gone(config, group, context) for context in point.contexts)
            for point in points
        )
        for group in KVGroup
        if config.layers_in(group)
    }


def check_room(config: ModelConfig, points: Sequence[Point], method: Method, free: int) -> None:
    """Raise BenchError where the points are too long for the model, or `free` bytes too few for them."""
    longest = max(max(point.contexts) for point in points) + method.steps
    if longest > config.max_positions:
        raise BenchError(f"{longest:,} tokens of context: the model takes {config.max_positions:,}")
    weights = weight_bytes(config, torch.bfloat16)
    blocks = pool_blocks(config, points, method.steps)
    kv = sum(count * block_bytes(config, group, 2) for group, count in blocks.items())
    if weights + kv + _MARGIN > free:
        raise BenchError(
            f"{weights / 1e9:.1f} GB of weights and {kv / 1e9:.1f} GB of KV do not fit the "
            f"{free / 1e9:.1f} GB that are free: measure fewer rows or less context"
        )


def hopper() -> None:
    """Raise BenchError unless there is a Hopper GPU."""
    if not has_hopper():
        raise BenchError("the decode kernel needs a Hopper GPU, and there is none here")


def bandwidth_of(device: str) -> float:
    """Bytes a second of a device's memory by its datasheet. Raises BenchError for one that is not known."""
    known = [name for name in BANDWIDTHS if device.startswith(name)]
    if not known:
        raise BenchError(f"the bandwidth of {device} is not known here: give it with --bandwidth, in TB/s")
    return BANDWIDTHS[max(known, key=len)]


def measure(
    config: ModelConfig,
    point: Point,
    tables: Sequence[BlockTables],
    kernel: Launches,
    *,
    bandwidth: float,
    method: Method,
    clock: Callable[[], float] = time.perf_counter,
    power: Callable[[float, float], Power | None] = lambda begin, end: None,
) -> Measured:
    """Time one point. Raises BenchError if a launch did not make every token of every row.

    `power` is asked about the time from one reading of `clock` to another: a `Watch`'s `between`.
    """
    generator = random.Random(method.seed)
    experts: list[float] = []
    ends = [clock()]
    for _ in range(method.warm_up + method.launches):
        rows = [
            LaunchRow(
                slot=slot,
                token=generator.randrange(config.vocab_size),
                position=context - 1,
                tables=tables[slot],
                params=_GREEDY,
            )
            for slot, context in enumerate(point.contexts)
        ]
        _complete(list(kernel.launch(rows, method.steps)), point, method.steps)
        ends.append(clock())
        experts.append(kernel.experts_read / method.steps)
    timed = ends[method.warm_up :]
    used = statistics.mean(experts[-method.launches :])
    return Measured(
        point=point,
        milliseconds=tuple((end - begin) * 1e3 / method.steps for begin, end in pairwise(timed)),
        experts=used,
        uniform=uniform_experts(config, point.rows),
        read=_mean_bytes(config, point, method.steps, used),
        bandwidth=bandwidth,
        power=power(timed[0], timed[-1]),
    )


def _complete(made: Sequence[Sequence[int | None]], point: Point, steps: int) -> None:
    if len(made) != steps or any(len(tokens) != point.rows or None in tokens for tokens in made):
        raise BenchError(f"a launch made tokens of {len(made)} of {steps} steps, or not of all rows")
    if any(NO_TOKEN in tokens for tokens in made):
        raise BenchError("a row's logits are not finite: what was timed is not the work of a model")


def _mean_bytes(config: ModelConfig, point: Point, steps: int, experts: float) -> StepBytes:
    """Over the steps of a launch, whose rows move on by one position each."""
    each = [
        step_bytes(config, [context - 1 + step for context in point.contexts], experts)
        for step in range(steps)
    ]
    return StepBytes(each[0].weights, each[0].experts, statistics.mean(step.kv for step in each))


def bench_decode(
    config: ModelConfig,
    points: Sequence[Point],
    *,
    bandwidth: float | None = None,
    method: Method | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Measured]:
    """Measure the points on this machine's GPU, one after the other; each result as soon as it is there.

    `bandwidth` in bytes a second, by default what the device's datasheet says. Raises BenchError where it
    cannot be done; VariantError and BuildError of the kernel.
    """
    from headrace.kernel.pool import KernelPool
    from headrace.step.pack import pack_synthetic

    method = method or Method()
    hopper()
    bandwidth = bandwidth or bandwidth_of(torch.cuda.get_device_name())
    check_room(config, points, method, torch.cuda.mem_get_info()[0])
    # From here on, so that it looks well before the first point is timed.
    with Watch(nvidia_smi(str(torch.cuda.get_device_properties().uuid))) as watch:
        weights = pack_synthetic(
            config, seed=method.seed, device="cuda", dtype=torch.bfloat16, progress=progress
        )
        torch.cuda.empty_cache()
        pool = Pool(config, points, method, "cuda")
        kernels = KernelPool(
            weights,
            pool.cache,
            max_rows=max(point.rows for point in points),
            max_context=max(max(point.contexts) for point in points) + method.steps,
            progress=tell,
        )
        kernels.prepare()
        for point in points:
            yield measure(
                config,
                point,
                pool.tables(point),
                kernels.launcher(point.rows),
                bandwidth=bandwidth,
                method=method,
                power=watch.between,
            )
