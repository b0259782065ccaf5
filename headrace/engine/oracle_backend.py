"""Decoding by the plan of a step, executed on the CPU: slow, and with every access checked.

What is served is what the plan says, so a conversation is a test of the plan. Prompts go through the PyTorch
model, which shares the KV pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.kernel_backend import launch_row
from headrace.engine.torch_backend import TorchBackend
from headrace.model.batch import Span
from headrace.model.kv import KVCache
from headrace.model.sampler import Sampled
from headrace.model.sampling import TokenLogprobs
from headrace.model.transformer import Model
from headrace.step.isa import MAX_ROWS, ROW_CAPACITIES
from headrace.step.oracle.arithmetic import Rounding
from headrace.step.oracle.machine import Oracle
from headrace.step.oracle.order import Order
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.weights import WeightPages
from headrace.step.pack import pack_model
from headrace.step.planner import build_plan

# Every SM repeats the norms and the choice of experts; two are the fewest that exchange anything.
SMS = 2


class OracleBackend:
    """Runs decode rows of `model` through plans for `sms` SMs, one plan for each row capacity that is used.

    Weights and pages in float32 are computed in float32, those in bfloat16 are rounded as a kernel rounds.
    `prepare` raises PlanError for a model that has no plan.
    """

    name = "oracle"
    takes_constraints = True
    takes_several_rows = True

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        max_rows: int,
        max_steps: int = 16,
        sms: int = SMS,
        order: Order | None = None,
    ) -> None:
        self.max_rows = min(max_rows, MAX_ROWS)
        self.max_steps = max_steps
        self._model = model
        self._cache = cache
        self._sms = sms
        self._order = order
        self._prefiller = TorchBackend(model, cache, max_rows=max_rows)
        self.layers = self._prefiller.layers
        self.full = self._prefiller.full
        self._weights: WeightPages | None = None
        self._oracles: dict[int, Oracle] = {}

    def prepare(self) -> None:
        """Pack the weights into pages."""
        packed = pack_model(self._model, device="cpu", dtype=self._model.dtype)
        self._weights = WeightPages(packed.data, packed.norms)

    def prefill(self, chunks: Sequence[Span]) -> None:
        self._prefiller.prefill(chunks)

    def begin(self, chunks: Sequence[Span]) -> Callable[[int], None]:
        return self._prefiller.begin(chunks)

    def score(self, chunk: Span, following: Sequence[int], count: int) -> list[TokenLogprobs]:
        return self._prefiller.score(chunk, following, count)

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        oracle = self._oracle(len(rows))
        if any(row.constraint is not None for row in rows):
            steps = 1  # a launch cannot ask for the next mask
        yield from oracle.launch([as_it_is(launch_row(row)) for row in rows], steps, interrupt.is_set)

    def _oracle(self, rows: int) -> Oracle:
        """The oracle of the smallest capacity that takes so many rows."""
        capacity = next(capacity for capacity in ROW_CAPACITIES if capacity >= rows)
        if capacity not in self._oracles:
            if self._weights is None:
                raise RuntimeError("prepare() comes before run()")
            exact = self._model.dtype.itemsize == 4
            self._oracles[capacity] = Oracle(
                build_plan(self._model.config, rows=capacity, sms=self._sms),
                self._weights,
                self._cache,
                rounding=Rounding.FLOAT32 if exact else Rounding.BFLOAT16,
                order=self._order,
            )
        return self._oracles[capacity]


def as_it_is(row: LaunchRow) -> LaunchRow:
    """The row with copies of the sequence's lists: the engine appends to these while the launch runs."""
    return replace(row, prompt=tuple(row.prompt), output=tuple(row.output))
