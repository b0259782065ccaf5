"""Kernels for the host, compiled when they are asked for, and benches whose kernels they are."""

from __future__ import annotations

import fcntl
import hashlib
from functools import cache
from pathlib import Path

from headrace.kernel.check.against_oracle import Bench
from headrace.kernel.check.kernels import MakeKernel
from headrace.model.config import ModelConfig
from headrace.model.kv import KVCache
from headrace.step import division
from headrace.step.oracle.world import World, north
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.kernel.emulated import Library, Spoilt
from tests.kernel.emulated.decode import NOBODY, EmulatedKernel, Late, compiled

SMS = 3


@cache
def plan_of(config: ModelConfig, rows: int, sms: int, chunk_blocks: int) -> Plan:
    """`chunk_blocks` is how attention is divided at present: lists differ with it."""
    return build_plan(config, rows=rows, sms=sms)


class Libraries:
    """Kernels by what they were compiled from, kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[object, ...], Library] = {}

    def library(
        self, config: ModelConfig, rows: int, sms: int, strict: bool, spoilt: Spoilt | None
    ) -> Library:
        """The same for all processes that test side by side: one of them compiles it."""
        shape = (config, rows, sms, int(vars(division)["CHUNK_BLOCKS"]))
        key = (*shape, strict, spoilt)
        if key not in self._made:
            folder = self._folder / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._made[key] = compiled(plan_of(*shape), folder, strict=strict, spoilt=spoilt)
        return self._made[key]

    def maker(
        self,
        config: ModelConfig,
        rows: int,
        *,
        sms: int = SMS,
        seed: int = 0,
        late: Late = NOBODY,
        spoilt: Spoilt | None = None,
    ) -> MakeKernel:
        """Makes kernels that run here. `seed` is for the order of threads and copies, as `late` is."""

        def make(
            plan: Plan, weights: PackedWeights, cache: KVCache, table_blocks: int, strict: bool
        ) -> EmulatedKernel:
            library = self.library(config, rows, sms, strict, spoilt)
            return EmulatedKernel(plan, weights, cache, table_blocks, library, seed, late)

        return make

    def bench(
        self,
        lengths: list[int],
        rows: int,
        hole: int | None = None,
        *,
        config: ModelConfig | None = None,
        world: type[World] = World,
        sms: int = SMS,
        seed: int = 0,
        late: Late = NOBODY,
        spoilt: Spoilt | None = None,
    ) -> Bench:
        """Whose kernels are those of `maker`."""
        shape = config or north()
        make = self.maker(shape, rows, sms=sms, seed=seed, late=late, spoilt=spoilt)
        return Bench(lengths, rows, hole, config=shape, world=world, make=make, device="cpu", sms=sms)
