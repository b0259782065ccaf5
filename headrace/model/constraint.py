"""Which tokens may come next: what a grammar asks of sampling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Mask = NDArray[np.int32]
"""int32 [ceil(vocab / 32)]: token t is allowed if bit t % 32 of word t // 32 is set."""


class Constraint(Protocol):
    """Follows one sequence. Called on the engine's thread, a mask before each token and then the token."""

    def mask(self) -> Mask | None:
        """The tokens that may come next, at least one; None for all. Valid until the next call."""

    def accept(self, token: int) -> None:
        """Take in the token that came."""


def mask_words(vocab_size: int) -> int:
    """The length of a mask."""
    return -(-vocab_size // 32)


def mask_of(tokens: Iterable[int], vocab_size: int) -> Mask:
    """The mask that allows `tokens`, and nothing else."""
    bits = np.zeros(mask_words(vocab_size) * 32, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def forbidden(mask: Mask, vocab_size: int) -> Tensor:
    """The tokens that `mask` does not allow: bool [vocab], on the CPU."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:vocab_size]
    return torch.from_numpy(bits == 0)
