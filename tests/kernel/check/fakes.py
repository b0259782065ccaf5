"""Kernels that are really the oracle: a right one, and wrong ones of several kinds. They need no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.check.kernels import MakeKernel, Rows, Tokens
from headrace.model.kv import KVCache
from headrace.step.isa import TILE_ROWS, Buffer
from headrace.step.oracle.arithmetic import Rounding
from headrace.step.oracle.machine import Oracle
from headrace.step.oracle.weights import WeightPages
from headrace.step.oracle.world import tokens_of
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan

Spoil = Callable[[Buffer, Tensor], Tensor]


class OracleKernel:
    """Gives what the oracle gives, with what `spoil` makes of its buffers, and tokens moved on by `shift`."""

    def __init__(
        self,
        plan: Plan,
        weights: PackedWeights,
        cache: KVCache,
        *,
        spoil: Spoil | None = None,
        shift: int = 0,
    ) -> None:
        pages = WeightPages(weights.data, weights.norms)
        self.oracle = Oracle(plan, pages, cache, rounding=Rounding.BFLOAT16)
        self.plan, self.spoil, self.shift = plan, spoil, shift

    def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]:
        for sampled in self.oracle.launch(rows, steps):
            yield [
                None if token is None else (token + self.shift) % self.plan.sizes.vocabulary
                for token in tokens_of(sampled)
            ]

    def buffer(self, buffer: Buffer) -> Tensor:
        if buffer is Buffer.LOGITS:
            sizes = self.plan.sizes
            padded = np.zeros((sizes.rows, sizes.vocabulary_tiles * TILE_ROWS), dtype=np.float32)
            padded[:, : sizes.vocabulary] = self.oracle.logits()
            left = padded.reshape(sizes.rows, -1, TILE_ROWS).swapaxes(0, 1)
        else:
            left = np.asarray(self.oracle.buffer(buffer), dtype=np.float32)
        found = torch.from_numpy(left.copy())
        return found if self.spoil is None else self.spoil(buffer, found)

    def poison(self) -> None:
        """The oracle poisons what is stale by itself."""


def kernel(*, spoil: Spoil | None = None, shift: int = 0) -> MakeKernel:
    """A maker of such kernels."""

    def make(plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> OracleKernel:
        return OracleKernel(plan, weights, cache, spoil=spoil, shift=shift)

    return make


def every_other_kernel(spoil: Spoil) -> MakeKernel:
    """The first kernel is right, the second wrong, and so on: bits that depend on who made them."""
    made = 0

    def make(plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> OracleKernel:
        nonlocal made
        made += 1
        return OracleKernel(plan, weights, cache, spoil=spoil if made % 2 == 0 else None)

    return make


def last_bit(buffer: Buffer, values: Tensor) -> Tensor:
    """One logit of every row a little larger."""
    if buffer is Buffer.LOGITS:
        values[3, :, 2] = torch.nextafter(values[3, :, 2], torch.tensor(9e9))
    return values


def scaled(spoilt: Buffer, by: float) -> Spoil:
    """One buffer a little too large."""
    return lambda buffer, values: values * by if buffer is spoilt else values


def not_a_number(spoilt: Buffer) -> Spoil:
    """One buffer that was never written."""
    return lambda buffer, values: values * torch.nan if buffer is spoilt else values
