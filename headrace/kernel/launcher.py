"""Launches the kernel: what stays on the device between launches, and the tokens as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.build import build
from headrace.kernel.device import DecodeKernel
from headrace.kernel.inputs import RowInputs
from headrace.kernel.mirror import Mirror, pinned_bytes
from headrace.kernel.records import ABSENT, HOST_LINK, LOGPROB_RECORD, PARAMS
from headrace.kernel.trace import Trace, read_trace, trace_bytes
from headrace.kernel.variant import variant_of
from headrace.kernel.watchdog import explain
from headrace.model.config import KVGroup
from headrace.model.kv import NO_BLOCK, KVCache
from headrace.model.rope import frequencies
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import TokenLogprobs
from headrace.step.buffers import arena, buffer_specs
from headrace.step.isa import Buffer
from headrace.step.machine import PACE_PLACES
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan

MAX_STEPS = 16  # of a launch
LONGEST_WAIT = 4.0  # seconds: the kernel counts nanoseconds in 32 bits
COUNTER_WORDS = 32  # a counter has 128 bytes of its own
GROUPS = (KVGroup.FULL, KVGroup.SLIDING)

_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32, "uint64": torch.int64}


class WatchdogError(RuntimeError):
    """A wait within the kernel took too long; the message names layer, task and counter."""


class Launcher:
    """A plan's kernel with its weights and KV pages, all on the current GPU.

    `timeout` bounds every wait within the kernel, in seconds, up to LONGEST_WAIT. `trace` records what every
    SM does when: see `headrace.kernel.trace`. `headers` by name take the place of the kernel's own, to try
    others. One launch at a time.
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
        trace: bool = False,
        headers: Mapping[str, str] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not 0 < timeout <= LONGEST_WAIT:
            raise ValueError(f"a wait may take up to {LONGEST_WAIT} seconds, not {timeout}")
        self.plan = plan
        variant = variant_of(plan, strict=strict, trace=trace).replaced(headers or {})
        self.binary = build(variant, progress=progress)
        self._kernel = DecodeKernel(self.binary.cubin)
        self._weights, self._cache = weights, cache
        self._timeout = timeout
        self._table_blocks = table_blocks
        device = weights.data.device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        sizes = plan.sizes
        self._specs = buffer_specs(sizes)
        self._offsets, total = arena(self._specs)
        self._buffers = torch.full((total,), 0xFF, dtype=torch.uint8, device=device)
        self._counters = counters_of(plan, device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._descriptors = torch.from_numpy(plan.descriptors).to(device)
        self._frequencies = frequencies(plan.config, device)
        self._pages = torch.tensor([pages.data_ptr() for pages in cache.pages], device=device)
        self._inputs = RowInputs(sizes.rows, sizes.vocabulary, device)
        self._tables = Mirror((sizes.rows, len(GROUPS), table_blocks), np.dtype(np.int32), device)
        self._link = pinned_bytes(HOST_LINK.itemsize, device)
        self.host: Any = self._link.numpy().view(HOST_LINK)[0:1]
        self._tokens = torch.zeros(MAX_STEPS, sizes.rows, dtype=torch.int32).pin_memory()
        self._ring = pinned_bytes(MAX_STEPS * sizes.rows * LOGPROB_RECORD.itemsize, device)
        self._logprobs = self._ring.numpy().view(LOGPROB_RECORD).reshape(MAX_STEPS, sizes.rows)
        self._trace = torch.zeros(
            trace_bytes(plan, MAX_STEPS) if trace else 0, dtype=torch.uint8, device=device
        )
        self._traced_steps = 0
        self._epoch = self._searched = 0  # steps since the counters were zeroed, and those that searched
        self.buffer(Buffer.HISTOGRAM).zero_()
        torch.cuda.synchronize(device)

    @property
    def experts_read(self) -> int:
        """Distinct experts whose weights the last launch read, summed over its steps and layers."""
        return int(self.host["experts"][0])

    def traced(self) -> Trace:
        """What the last launch recorded, for a launcher with `trace`."""
        return read_trace(self.plan, self._traced_steps, self._trace.cpu().numpy())

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

    def forget(self) -> None:
        """Have no later launch go on with what is known of sequences so far, between launches."""
        self._inputs.forget()

    def launch(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[int | None]]:
        """As `run`, but gives tokens alone."""
        for results in self.run(rows, steps, stop):
            yield [None if result is None else result.token for result in results]

    def run(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Sampled | None]]:
        """Up to `steps` steps, one item each: what every row made, None if it is absent or has ended.

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
                    yield self._results(told, rows)
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
            made = self._tokens[: int(self.host["steps"][0])]
            self._epoch += len(made)
            self._searched += len(made) if self._inputs.searching else 0
            self._check()
            self._inputs.ran(rows, [[token for token in row if token != ABSENT] for row in made.T.tolist()])

    def _results(self, step: int, rows: Sequence[LaunchRow | None]) -> list[Sampled | None]:
        results: list[Sampled | None] = []
        for index, token in enumerate(self._tokens[step, : len(rows)].tolist()):
            row = rows[index]
            if row is None or token == ABSENT:
                results.append(None)
            elif token == NO_TOKEN or row.params.logprobs is None:
                results.append(Sampled(token))
            else:
                results.append(with_logprobs(token, self._logprobs[step, index], row.params.logprobs))
        return results

    def _start(self, rows: Sequence[LaunchRow | None], steps: int) -> None:
        if not 1 <= steps <= MAX_STEPS or not 1 <= len(rows) <= self.plan.sizes.rows:
            raise ValueError(
                f"a launch takes 1 to {self.plan.sizes.rows} rows and 1 to {MAX_STEPS} steps, "
                f"not {len(rows)} and {steps}"
            )
        self._inputs.fill(rows)
        for index, row in enumerate(rows):
            if row is not None:
                self._fill_tables(index, row)
        self.host[:] = np.zeros(1, HOST_LINK)
        self._traced_steps = steps
        # Prompts write KV pages on the stream that is current here.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            if len(self._trace):
                self._trace.zero_()
            self._inputs.send()
            self._tables.send()
            self._kernel.launch(self.plan.sizes.sms, self._params(steps), self.stream)

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
            "abort_flag": self._abort,
            "host": self._link,
            "tokens": self._tokens,
            "logprobs": self._ring,
            "trace": self._trace,
        }
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for name, address in (addresses | self._inputs.addresses()).items():
            params[name] = address
        params["table_blocks"], params["steps"] = self._table_blocks, steps
        params["epoch"], params["timeout"] = self._epoch % 2**32, int(self._timeout * 1e9)
        params["searched"] = self._searched % 2**32
        return params

    def _check(self) -> None:
        """Start afresh and raise if the watchdog struck."""
        if not self.host["aborted"][0] and not int(self._abort[0]):
            return
        message = explain(self.plan, self.host[0])
        self._counters.zero_()
        self._abort.zero_()
        self._epoch = self._searched = 0
        self._inputs.forget()
        self.buffer(Buffer.HISTOGRAM).zero_()
        torch.cuda.synchronize()
        raise WatchdogError(message)


def counters_of(plan: Plan, device: torch.device) -> Tensor:
    """The plan's counters at 0, and behind them those of the places in pace.h.

    int32 [counters + PACE_PLACES, COUNTER_WORDS], of which the first word of each row counts.
    """
    return torch.zeros(len(plan.counters) + PACE_PLACES, COUNTER_WORDS, dtype=torch.int32, device=device)


def with_logprobs(token: int, record: Any, count: int) -> Sampled:
    """A token with its log-probability and those of the `count` most likely, from a LOGPROB_RECORD."""
    base = float(record["base"])
    tokens, raws = record["top_token"][:count].tolist(), record["top_raw"][:count].tolist()
    top = tuple((one, raw - base) for one, raw in zip(tokens, raws, strict=True) if one != NO_TOKEN)
    return Sampled(token, TokenLogprobs(token, float(record["raw"]) - base, top))
