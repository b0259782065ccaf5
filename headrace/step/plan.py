"""A plan: the task lists of every SM for one step, and all that an interpreter needs to run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.model.config import ModelConfig
from headrace.step.isa import WORDS, Field, Opcode
from headrace.step.machine import Machine
from headrace.step.sizes import Sizes
from headrace.step.weights import WeightMap

Words = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Plan:
    """One decode step of a model.

    `descriptors` is int32 [SMs, longest list, WORDS], filled up with END. `counters` names
    every counter by its id; id 0 is none.
    """

    config: ModelConfig
    sizes: Sizes
    weights: WeightMap
    descriptors: Words
    counters: tuple[str, ...]
    machine: Machine = field(default_factory=Machine)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tasks of every SM."""
        opcodes = self.descriptors[:, :, Field.OPCODE]
        return np.asarray((opcodes != Opcode.END).sum(axis=1), dtype=np.int64)

    def tasks(self, sm: int) -> Iterator[Words]:
        """The descriptors of one SM, in order, without END."""
        yield from self.descriptors[sm, : self.lengths[sm]]

    @property
    def bytes(self) -> int:
        """Bytes of all lists."""
        return self.descriptors.size * 4

    def __post_init__(self) -> None:
        expected = (self.sizes.sms, self.descriptors.shape[1], WORDS)
        if self.descriptors.shape != expected or self.descriptors.dtype != np.int32:
            raise ValueError(f"descriptors must be int32 {list(expected)}, not {self.descriptors.shape}")
