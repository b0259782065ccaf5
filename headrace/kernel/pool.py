"""The kernels of all row capacities over the same weights and KV pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.kernel.build import build_all
from headrace.kernel.launcher import Launcher
from headrace.kernel.rehearsal import rehearse
from headrace.kernel.variant import variant_of
from headrace.model.kv import KVCache, blocks_for
from headrace.step.isa import ROW_CAPACITIES
from headrace.step.pack import PackedWeights
from headrace.step.planner import build_plan


class KernelPool:
    """Launchers by capacity, made by `prepare` for up to `max_rows` rows of `max_context` tokens.

    Raises ValueError for more rows than the largest kernel has.
    """

    def __init__(
        self,
        weights: PackedWeights,
        cache: KVCache,
        *,
        max_rows: int,
        max_context: int,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if max_rows > ROW_CAPACITIES[-1]:
            raise ValueError(f"the kernel decodes at most {ROW_CAPACITIES[-1]} rows, not {max_rows}")
        self._weights, self._cache = weights, cache
        self._table_blocks = blocks_for(max_context)
        self._progress = progress
        self._capacities = [rows for rows in ROW_CAPACITIES if rows <= capacity_for(max_rows)]
        self._launchers: dict[int, Launcher] = {}

    def prepare(self) -> None:
        """Plan, compile and load every capacity.

        Raises PlanError or VariantError for a model that the kernel cannot run, BuildError or DeviceError.
        """
        sms = torch.cuda.get_device_properties(self._weights.data.device).multi_processor_count
        plans = {rows: build_plan(self._weights.config, rows=rows, sms=sms) for rows in self._capacities}
        build_all([variant_of(plan) for plan in plans.values()], progress=self._progress)
        for rows, plan in plans.items():
            if rows not in self._launchers:
                self._launchers[rows] = Launcher(
                    plan,
                    self._weights,
                    self._cache,
                    table_blocks=self._table_blocks,
                )

    def rehearse(self) -> None:
        """Launch every kernel, so that later launches take no longer for being first ones.

        To be called after `prepare`, while nobody holds a block.
        """
        rehearse(self._launchers, self._cache, self._weights.config.vocab_size)

    def launcher(self, rows: int) -> Launcher:
        """The smallest kernel that holds this many rows."""
        return self._launchers[capacity_for(rows)]


def capacity_for(rows: int) -> int:
    """The smallest row capacity that holds `rows`."""
    return min(capacity for capacity in ROW_CAPACITIES if capacity >= rows)
