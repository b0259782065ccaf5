"""Every buffer of one layer, as the kernel leaves it and as the oracle does: where in a step it goes wrong.

Layers use the same buffers one after another, so after a step only the last layer's are left. A model that
ends after the layer in question leaves that layer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.check.against_model import ModelBench, random_prompts
from headrace.kernel.check.against_oracle import error, left_by
from headrace.kernel.check.kernels import MakeKernel, on_gpu
from headrace.model.kv import KVCache
from headrace.step.oracle.arithmetic import Rounding
from headrace.step.oracle.machine import Oracle
from headrace.step.oracle.weights import WeightPages
from headrace.step.pack import PackedWeights
from headrace.step.packed_model import packed_model

LENGTHS = (1, 64, 65, 300)  # of the sequences whose next step is compared
ROWS = 4


@dataclass(frozen=True)
class Left:
    """What one buffer holds of the rows after a step: the kernel's values and the oracle's, float32."""

    name: str
    kernel: Tensor
    oracle: Tensor

    @property
    def error(self) -> float:
        """Relative, over what the oracle has written; NaN where the kernel has not."""
        return error(self.kernel, self.oracle)

    @property
    def largest(self) -> float:
        """The largest difference of two values, over what the oracle has written."""
        written = ~torch.isnan(self.oracle)
        return float((self.kernel - self.oracle)[written].abs().max())


def left_by_last_layer(packed: PackedWeights, *, make: MakeKernel = on_gpu, sms: int = 132) -> list[Left]:
    """The buffers of the last layer of a model, after one step of sequences of LENGTHS tokens.

    LOGITS is what the model's head makes of that layer's X.
    """
    config = packed.config
    prompts = random_prompts(config, LENGTHS)
    bench = ModelBench(packed_model(packed), prompts, ROWS, packed=packed, make=make, sms=sms)
    oracle = _oracle(bench, packed)
    list(bench.kernel.launch(bench.fed, 1))
    list(oracle.launch(bench.fed, 1))
    pairs = left_by(bench.kernel, oracle, list(range(len(LENGTHS))))
    return [Left(name, *pair) for name, pair in pairs.items()]


def _oracle(bench: ModelBench, packed: PackedWeights) -> Oracle:
    cache = KVCache(packed.config, bench.cache.blocks, dtype=torch.bfloat16)
    for pages, filled in zip(cache.pages, bench.cache.pages, strict=True):
        pages.copy_(filled)
    weights = WeightPages(packed.data.cpu(), packed.norms.cpu())
    return Oracle(bench.plan, weights, cache, rounding=Rounding.BFLOAT16)


def save(buffers: list[Left], path: Path) -> None:
    """As a .npz file with two arrays for each buffer, such as X.kernel and X.oracle."""
    arrays = {f"{left.name}.kernel": left.kernel.numpy() for left in buffers}
    arrays |= {f"{left.name}.oracle": left.oracle.numpy() for left in buffers}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
