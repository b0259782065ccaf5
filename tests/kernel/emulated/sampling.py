"""The kernel's sampling alone, on logits that are given: in the place of `headrace.kernel.launcher`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernel.inputs import RowInputs
from headrace.kernel.launcher import MAX_STEPS, with_logprobs
from headrace.kernel.records import ABSENT, HOST_LINK, LOGPROB_RECORD, PARAMS
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.step.buffers import ALIGNMENT, arena, buffer_specs
from headrace.step.isa import Buffer, Field, Opcode
from headrace.step.oracle.rows import LaunchRow
from headrace.step.plan import Plan
from tests.kernel.emulated import Library, Spoilt

SAMPLING = (Opcode.SAMPLE_STATS, Opcode.SAMPLE_SELECT, Opcode.SAMPLE_PICK, Opcode.SAMPLE_COMMIT)

Floats = npt.NDArray[np.float32]


def compiled(plan: Plan, folder: Path, spoilt: Spoilt | None = None) -> Library:
    """The sampling operations of a plan."""
    return Library(plan, folder, "sampling.cpp", "consumer.h", spoilt=spoilt)


class Emulated:
    """As `headrace.kernel.launcher.Launcher`, for sampling alone: the logits of every step are given."""

    def __init__(self, plan: Plan, library: Library) -> None:
        self.plan, self._library = plan, library
        sizes = plan.sizes
        self._specs = buffer_specs(sizes)
        self._offsets, total = arena(self._specs)
        memory = np.full(total + ALIGNMENT, 0xFF, dtype=np.uint8)
        self._memory = memory[-memory.ctypes.data % ALIGNMENT :]
        self.buffer(Buffer.HISTOGRAM)[:] = 0
        self.inputs = RowInputs(sizes.rows, sizes.vocabulary, torch.device("cpu"))
        own = np.isin(plan.descriptors[..., Field.OPCODE], [int(opcode) for opcode in SAMPLING])
        self._tasks = np.stack([tasks[mine] for tasks, mine in zip(plan.descriptors, own, strict=True)])
        self._host = np.zeros(1, HOST_LINK)
        self._tokens = np.zeros((MAX_STEPS, sizes.rows), np.int32)
        self._logprobs = np.zeros((MAX_STEPS, sizes.rows), LOGPROB_RECORD)

    def buffer(self, buffer: Buffer) -> npt.NDArray[np.int32]:
        """A buffer as 32-bit words."""
        begin = self._offsets[buffer]
        return self._memory[begin : begin + self._specs[buffer].bytes].view(np.int32)

    def run(
        self, rows: Sequence[LaunchRow | None], logits: Floats, order: int = 0
    ) -> list[list[Sampled | None]]:
        """A step for each of `logits` [steps, rows, vocabulary].

        Raises EmulationError if threads wait in vain.
        """
        self.inputs.fill(rows)
        self.inputs.send()
        self._host[:] = np.zeros(1, HOST_LINK)
        tiles = self._tiles(logits)
        params = self._params(len(logits))
        self._library.run(params, self._tasks, self._tasks.shape[1], tiles, order)
        steps = int(self._host["steps"][0])
        made = self._tokens[:steps].T.tolist()
        self.inputs.ran(rows, [[token for token in row if token != ABSENT] for row in made])
        return [[self._result(step, *row) for row in enumerate(rows)] for step in range(steps)]

    def _tiles(self, logits: Floats) -> Floats:
        """As LM_HEAD leaves them; what is padding is large, and would be taken if it was looked at."""
        sizes = self.plan.sizes
        padded = np.full((len(logits), sizes.rows, sizes.vocabulary_tiles * 8), 9e9, dtype=np.float32)
        padded[:, : logits.shape[1], : sizes.vocabulary] = logits
        return np.ascontiguousarray(padded.reshape(len(logits), sizes.rows, -1, 8).swapaxes(1, 2))

    def _params(self, steps: int) -> np.ndarray[Any, Any]:
        params = np.zeros(1, PARAMS)
        arrays = {
            "buffers": self._memory,
            "host": self._host,
            "tokens": self._tokens,
            "logprobs": self._logprobs,
        }
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        for name, address in (addresses | self.inputs.addresses()).items():
            params[name] = address
        params["steps"] = steps
        return params

    def _result(self, step: int, index: int, row: LaunchRow | None) -> Sampled | None:
        token = int(self._tokens[step, index])
        if row is None or token == ABSENT:
            return None
        if token == NO_TOKEN or row.params.logprobs is None:
            return Sampled(token)
        return with_logprobs(token, self._logprobs[step, index], row.params.logprobs)
