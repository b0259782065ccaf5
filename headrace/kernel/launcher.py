"""Launches the kernel: what stays on the device between launches, and the tokens as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.build import build
from headrace.kernel.device import Module
from headrace.kernel.records import ABSENT, HOST_LINK, PARAMS, ROW_INPUT
from headrace.kernel.variant import variant_of
from headrace.kernel.watchdog import explain
from headrace.model.config import KVGroup
from headrace.model.kv import NO_BLOCK, KVCache
from headrace.model.rope import frequencies
from headrace.step.buffers import arena, buffer_specs
from headrace.step.isa import Buffer
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan

MAX_STEPS = 16
COUNTER_WORDS = 32  # a counter has 128 bytes of its own
STOP_TOKENS = 4096  # of all rows of a launch
GROUPS = (KVGroup.FULL, KVGroup.SLIDING)

_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32, "uint64": torch.int64}


class WatchdogError(RuntimeError):
    """A wait within the kernel took too long; the message names layer, task and counter."""


class Launcher:
    """A plan's kernel with its weights and KV pages, all on the current GPU.

    `timeout` bounds every wait within the kernel, in seconds. One launch at a time.
    """

    def __init__(
        self,
        plan: Plan,
        weights: PackedWeights,
        cache: KVCache,
        *,
        table_blocks: int,
        strict: bool = False,
        timeout: float = 1.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.binary = build(variant_of(plan, strict=strict), progress=progress)
        self._module = Module(self.binary.cubin)
        self._weights, self._cache = weights, cache
        self._timeout = timeout
        self._table_blocks = table_blocks
        device = weights.data.device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        sizes = plan.sizes
        self._specs = buffer_specs(sizes)
        self._offsets, total = arena(self._specs)
        self._buffers = torch.full((total,), 0xFF, dtype=torch.uint8, device=device)
        self._counters = torch.zeros(len(plan.counters), COUNTER_WORDS, dtype=torch.int32, device=device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._descriptors = torch.from_numpy(plan.descriptors).to(device)
        self._frequencies = frequencies(plan.config, device)
        self._pages = torch.tensor([pages.data_ptr() for pages in cache.pages], device=device)
        self._inputs = _Mirrored((sizes.rows * ROW_INPUT.itemsize // 4,), device)
        self._tables = _Mirrored((sizes.rows, len(GROUPS), table_blocks), device)
        self._stops = _Mirrored((STOP_TOKENS,), device)
        self._link = torch.zeros(HOST_LINK.itemsize, dtype=torch.uint8).pin_memory()
        self.host: Any = self._link.numpy().view(HOST_LINK)[0:1]
        self._tokens = torch.zeros(MAX_STEPS, sizes.rows, dtype=torch.int32).pin_memory()
        self._epoch = 0
        self.buffer(Buffer.HISTOGRAM).zero_()
        torch.cuda.synchronize(device)

    @property
    def experts_read(self) -> int:
        """Distinct experts whose weights the last launch read, summed over its steps and layers."""
        return int(self.host["experts"][0])

    def buffer(self, buffer: Buffer) -> Tensor:
        """A view of a buffer on the device."""
        spec = self._specs[buffer]
        begin = self._offsets[buffer]
        return self._buffers[begin : begin + spec.bytes].view(_TYPES[spec.dtype]).view(spec.shape)

    def poison(self) -> None:
        """Fill every exchange buffer with what no task writes, between launches."""
        kept = self.buffer(Buffer.HISTOGRAM).clone()
        self._buffers.fill_(0xFF)
        self.buffer(Buffer.HISTOGRAM).copy_(kept)
        torch.cuda.synchronize()

    def launch(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[int | None]]:
        """Up to `steps` steps, one item each: every row's token, None for a row that is absent or has ended.

        NO_TOKEN ends a row whose logits are not finite. Raises WatchdogError if the kernel gave up.
        """
        self._start(rows, steps)
        told = 0
        finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        finished.record(self.stream)
        try:
            while told < steps:
                over = bool(finished.query())  # type: ignore[no-untyped-call]
                if self.host["steps"][0] > told:
                    yield self._row_tokens(told, len(rows))
                    told += 1
                    if stop():
                        self.host["stop"] = 1
                elif over:
                    break
                else:
                    time.sleep(10e-6)
        finally:
            self.host["stop"] = 1
            finished.synchronize()
            self._epoch += int(self.host["steps"][0])
            self._check()

    def _row_tokens(self, step: int, count: int) -> list[int | None]:
        return [None if token == ABSENT else token for token in self._tokens[step, :count].tolist()]

    def _start(self, rows: Sequence[LaunchRow | None], steps: int) -> None:
        if not 1 <= steps <= MAX_STEPS or not 1 <= len(rows) <= self.plan.sizes.rows:
            raise ValueError(
                f"a launch takes 1 to {self.plan.sizes.rows} rows and 1 to {MAX_STEPS} steps, "
                f"not {len(rows)} and {steps}"
            )
        inputs = self._inputs.host.view(ROW_INPUT)
        inputs[:] = np.zeros(1, ROW_INPUT)
        used = 0
        for index, row in enumerate(rows):
            if row is None:
                continue
            stops = sorted(row.stop_token_ids)
            if used + len(stops) > STOP_TOKENS:
                raise ValueError(f"the rows of a launch have more than {STOP_TOKENS} stop tokens")
            self._stops.host[used : used + len(stops)] = stops
            inputs[index] = (1, row.slot, row.token, row.position, row.max_tokens, used, len(stops), 0)
            used += len(stops)
            self._fill_tables(index, row)
        self.host[:] = np.zeros(1, HOST_LINK)
        with torch.cuda.stream(self.stream):
            for mirrored in (self._inputs, self._tables, self._stops):
                mirrored.send()
            self._module.launch(self.plan.sizes.sms, self._params(steps), self.stream)

    def _fill_tables(self, index: int, row: LaunchRow) -> None:
        for group, table in enumerate(self._tables.host[index]):
            blocks = row.tables.get(GROUPS[group], ())
            if len(blocks) > self._table_blocks:
                raise ValueError(
                    f"a row has {len(blocks)} blocks, and there is room for {self._table_blocks}"
                )
            table[: len(blocks)] = blocks
            table[len(blocks) :] = NO_BLOCK

    def _params(self, steps: int) -> np.ndarray[Any, Any]:
        params = np.zeros(1, PARAMS)
        tensors = {
            "descriptors": self._descriptors,
            "weights": self._weights.data,
            "norms": self._weights.norms,
            "frequencies": self._frequencies,
            "buffers": self._buffers,
            "counters": self._counters,
            "kv_pages": self._pages,
            "tables": self._tables.device,
            "rows": self._inputs.device,
            "stop_tokens": self._stops.device,
            "abort_flag": self._abort,
            "host": self._link,
            "tokens": self._tokens,
        }
        for name, tensor in tensors.items():
            params[name] = tensor.data_ptr()
        params["table_blocks"], params["steps"] = self._table_blocks, steps
        params["epoch"], params["timeout"] = self._epoch % 2**32, int(self._timeout * 1e9)
        return params

    def _check(self) -> None:
        """Start afresh and raise if the watchdog struck."""
        if not self.host["aborted"][0] and not int(self._abort[0]):
            return
        message = explain(self.plan, self.host[0])
        self._counters.zero_()
        self._abort.zero_()
        self._epoch = 0
        raise WatchdogError(message)


class _Mirrored:
    """An int32 array in pinned memory and on the device."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._pinned = torch.zeros(shape, dtype=torch.int32).pin_memory()
        self.host = self._pinned.numpy()
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)

    def send(self) -> None:
        self.device.copy_(self._pinned, non_blocking=True)
