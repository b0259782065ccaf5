"""The whole kernel on the host: in the place of `headrace.kernel.launcher.Launcher`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.check.kernels import Rows, Tokens
from headrace.kernel.inputs import RowInputs
from headrace.kernel.launcher import GROUPS, MAX_STEPS, counters_of
from headrace.kernel.records import ABSENT, HOST_LINK, LOGPROB_RECORD, PARAMS
from headrace.kernel.trace import Trace, read_trace, trace_bytes
from headrace.kernel.watchdog import explain
from headrace.model.kv import NO_BLOCK, KVCache
from headrace.model.rope import frequencies
from headrace.step.buffers import ALIGNMENT, arena, buffer_specs
from headrace.step.isa import Buffer
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan
from tests.kernel.emulated import EmulationError, Library, Spoilt

_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32, "uint64": torch.int64}


class Late(NamedTuple):
    """Threads of an SM, from `first` up to `end`."""

    sm: int
    first: int
    end: int


NOBODY = Late(0, 0, 0)


def compiled(
    plan: Plan, folder: Path, *, strict: bool = False, trace: bool = False, spoilt: Spoilt | None = None
) -> Library:
    """The kernel of a plan; `trace`: one that records itself."""
    return Library(plan, folder, "decode.cpp", strict=strict, trace=trace, spoilt=spoilt)


class EmulatedKernel:
    """A `headrace.kernel.check.kernels.Kernel`.

    `seed` is for the order of threads and copies; `late` threads go on only where nobody else can.
    """

    def __init__(
        self,
        plan: Plan,
        weights: PackedWeights,
        cache: KVCache,
        table_blocks: int,
        library: Library,
        seed: int = 0,
        late: Late = NOBODY,
    ) -> None:
        self.plan, self.seed, self.late = plan, seed, late
        self._weights, self._cache, self._library = weights, cache, library
        sizes, device = plan.sizes, torch.device("cpu")
        self._specs = buffer_specs(sizes)
        self._offsets, total = arena(self._specs)
        memory = torch.full((total + ALIGNMENT,), 0xFF, dtype=torch.uint8)
        self._buffers = memory[-memory.data_ptr() % ALIGNMENT :]
        self._arrays: dict[str, Tensor] = {
            "descriptors": torch.from_numpy(plan.descriptors),
            "weights": weights.data,
            "norms": weights.norms,
            "frequencies": frequencies(plan.config, device),
            "buffers": self._buffers,
            "counters": counters_of(plan, device),
            "kv_pages": torch.tensor([pages.data_ptr() for pages in cache.pages]),
            "tables": torch.zeros(sizes.rows, len(GROUPS), table_blocks, dtype=torch.int32),
            "abort_flag": torch.zeros(1, dtype=torch.int32),
            "trace": torch.zeros(
                trace_bytes(plan, MAX_STEPS), dtype=torch.uint8
            ),  # only for those that record
        }
        self._inputs = RowInputs(sizes.rows, sizes.vocabulary, device)
        self._host = np.zeros(1, HOST_LINK)
        self._tokens = np.zeros((MAX_STEPS, sizes.rows), np.int32)
        self._logprobs = np.zeros((MAX_STEPS, sizes.rows), LOGPROB_RECORD)
        self._epoch = self._searched = 0  # steps since the counters were zeroed, and those that searched
        self.buffer(Buffer.HISTOGRAM).zero_()

    def buffer(self, buffer: Buffer) -> Tensor:
        spec, begin = self._specs[buffer], self._offsets[buffer]
        return self._buffers[begin : begin + spec.bytes].view(_TYPES[spec.dtype]).view(spec.shape)

    @property
    def counters(self) -> Tensor:
        return self._arrays["counters"]

    def traced(self, steps: int) -> Trace:
        """What the last launch recorded, of so many steps."""
        return read_trace(self.plan, steps, self._arrays["trace"].numpy())

    def poison(self) -> None:
        kept = self.buffer(Buffer.HISTOGRAM).clone()
        self._buffers.fill_(0xFF)
        self.buffer(Buffer.HISTOGRAM).copy_(kept)

    def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]:
        """Raises EmulationError if the launch does not end, or its watchdog strikes."""
        self._inputs.fill(rows)
        self._inputs.send()
        self._fill_tables(rows)
        self._host[:] = np.zeros(1, HOST_LINK)
        try:
            self._library.run(self._params(steps), self.seed, *self.late)
        finally:
            if self._host["aborted"][0]:  # first of all: threads may well stumble when they are told to stop
                raise EmulationError(explain(self.plan, self._host[0]))
        made = self._tokens[: int(self._host["steps"][0])]
        self._epoch += len(made)
        self._searched += len(made) if self._inputs.searching else 0
        self._inputs.ran(rows, [[token for token in row if token != ABSENT] for row in made.T.tolist()])
        for tokens in made[:, : len(rows)].tolist():
            yield [None if token == ABSENT else token for token in tokens]

    def _fill_tables(self, rows: Rows) -> None:
        tables = self._arrays["tables"].fill_(NO_BLOCK)
        for index, row in enumerate(rows):
            if row is None:
                continue
            for group, kind in enumerate(GROUPS):
                blocks = row.tables.get(kind, ())
                tables[index, group, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def _params(self, steps: int) -> np.ndarray[Any, Any]:
        params = np.zeros(1, PARAMS)
        addresses = {
            name: array.data_ptr() for name, array in self._arrays.items()
        } | self._inputs.addresses()
        written = {"host": self._host, "tokens": self._tokens, "logprobs": self._logprobs}
        addresses |= {name: array.ctypes.data for name, array in written.items()}
        for name, address in addresses.items():
            params[name] = address
        params["table_blocks"], params["steps"] = self._arrays["tables"].shape[2], steps
        params["epoch"], params["timeout"] = self._epoch, 1_000_000_000
        params["searched"] = self._searched
        return params
