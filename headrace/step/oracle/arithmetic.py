"""The arithmetic of the oracle, and where it rounds.

Every operation here works on each element by itself, and every sum is folded in an order that depends on its
length alone. So a row's bits cannot depend on the rows beside it, on the number of SMs, or on threads.

Rounding.BFLOAT16 rounds exactly where a kernel on bfloat16 data must, Rounding.FLOAT32 nowhere:

    value                                             BFLOAT16 mode               FLOAT32 mode
    weights and embeddings                            as stored                   as stored
    X, QKV, ATTENTION_OUT, HIDDEN, SHARED_HIDDEN      once, when written          float32
    keys and values in pages                          the values of QKV           the values of QKV
    norm(X), the input of a product                   once                        float32
    p = exp(s - m), the weights of values             once, before the product    float32
    norms' weights, scores, maxima and sums of
    softmax, PARTIALS, ROUTER_LOGITS and the
    experts' weights, RESIDUAL, LOGITS                float32                     float32
    exp within silu, sigmoid and softmax              float64, to float32         float64, to float32
    sampling: sums of exp, weights, noise             float64 and integers        float64 and integers
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from headrace.model.config import Norm

Floats = npt.NDArray[np.float32]

_TOGETHER = 1 << 18  # products that are made at once; more are made row by row, with the same result


class Rounding(StrEnum):
    """Which of the two columns above holds."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def apply(self, values: Floats) -> Floats:
        """The values as a buffer of type bfloat16 holds them."""
        return values if self is Rounding.FLOAT32 else bfloat16(values)


def bfloat16(values: Floats) -> Floats:
    """Rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.asarray(np.where(np.isnan(values), values, rounded), dtype=np.float32)


def fold(values: Floats) -> Floats:
    """The sum over the last axis: halves are added while the length is even, then the rest from the left."""
    length = values.shape[-1]
    while length % 2 == 0:
        length //= 2
        values = values[..., :length] + values[..., length:]
    total = values[..., 0]
    for index in range(1, length):
        total = total + values[..., index]
    return np.asarray(total, dtype=np.float32)


def dot(inputs: Floats, weights: Floats) -> Floats:
    """inputs [rows, k] times weights [outputs, k]: [rows, outputs]."""
    if inputs.shape[0] * weights.size <= _TOGETHER:
        return fold(inputs[:, None, :] * weights)
    return np.stack([fold(row * weights) for row in inputs])


def exp(values: Floats) -> Floats:
    """exp in float64, rounded to float32: the one rounding hides how a library computes it."""
    with np.errstate(over="ignore", under="ignore"):
        wide = np.exp(np.ascontiguousarray(values, dtype=np.float64))
        return np.asarray(wide, dtype=np.float32)


def silu(values: Floats) -> Floats:
    """x / (1 + exp(-x))."""
    return np.asarray(values / (np.float32(1) + exp(-values)), dtype=np.float32)


def sigmoid(values: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    return np.asarray(np.float32(1) / (np.float32(1) + exp(-values)), dtype=np.float32)


def normalized(x: Floats, weight: Floats, kind: Norm, eps: float) -> Floats:
    """x [rows, hidden] through a norm, float32 and not yet rounded."""
    width = np.float32(x.shape[-1])
    if kind is Norm.LAYER:
        x = x - (fold(x) / width)[..., None]
    deviation = np.sqrt(fold(x * x) / width + np.float32(eps))
    return np.asarray(x * (np.float32(1) / deviation)[..., None] * weight, dtype=np.float32)


def turned(pairs: Floats, positions: npt.NDArray[np.int64], frequencies: Floats) -> Floats:
    """Rotary embedding of neighbouring elements: pairs [rows, n, 2] by position * frequencies [n]."""
    angles = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))
    cos32, sin32 = cos.astype(np.float32), sin.astype(np.float32)
    a, b = pairs[..., 0], pairs[..., 1]
    return np.stack((a * cos32 - b * sin32, b * cos32 + a * sin32), axis=-1)
