"""Noise for sampling that depends only on (seed, position, token id): the same on every device, in any batch.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3;
SC'11): a keyed bijection of 128-bit counters, four 32-bit words a call, with no state. Its inputs here:

    key      seed bits 0..31, seed bits 32..63
    counter  token id // 4, position bits 0..31, position bits 32..63, 0
    word     token id % 4 of the four

The last counter word numbers the use: 0 is sampling; others are free for draws that must not depend on it.

A word w becomes a uniform number v in (0, 1): (w + 1/2) / 2^32, rounded toward zero to 24 significant bits,
so that a float32 holds it exactly. Below 2^-9 nothing is rounded; v lies in [2^-33, 1 - 2^-24]. In CUDA:
`__fmul_rn(__fadd_rz(__uint2float_rz(w), 0.5f), 0x1p-32f)`.

The noise is Gumbel(v) = -ln(-ln(1 - v)): small v, which are resolved most finely, make the large noise that
decides a draw. It lies in [-2.82, 22.88]. That it ends there cannot be seen in draws: beside a dominant
token, one of probability q is drawn with probability 2^-32 / (2 sinh(1 / (2 lambda))) for lambda = 2^32 q,
which is q within 0.3 % down to q = 2^-30. If all of 262,144 tokens were that rare, 6e-7 of the draws would be
amiss. In a flat vocabulary of 262,144 the two best tie in 2^18 / 2^32 = 6e-5 of the draws. With uniforms of
24 bits that would be 1.6 %, and the tie rule would visibly favour low ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10

UNIFORM_MIN = 2.0**-33
UNIFORM_MAX = 1.0 - 2.0**-24

# NumPy's uint64 arithmetic is almost twice as fast as torch's int64 on a CPU; the same lines serve both.
Words = TypeVar("Words", Tensor, npt.NDArray[np.uint64])


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of every element of four counter and two key words.

    All are 32-bit words held in uint64 arrays or in int64 tensors, which broadcast.
    """
    # Any: NumPy's stubs do not know that a Python integer leaves uint64 as it is.
    words: tuple[Any, ...] = (*counter, *key)
    c0, c1, c2, c3, k0, k1 = words
    for _ in range(_ROUNDS):
        # An int64 product wraps, and its shift drags the sign along; the mask leaves the right 32 bits.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = product0 >> 32, product1 >> 32
        c0 = ((high1 & _WORD) ^ c1) ^ k0
        c2 = ((high0 & _WORD) ^ c3) ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seeds: Sequence[int], positions: Sequence[int], owners: Tensor, tokens: Tensor) -> Tensor:
    """The uniform numbers of single tokens: float32 [n], in [UNIFORM_MIN, UNIFORM_MAX].

    Entry i belongs to token `tokens[i]` in the row with seed `seeds[owners[i]]` and position
    `positions[owners[i]]`. `owners` and `tokens` are int64 [n] on one device, which the result is on.
    """
    words = _words(tokens >> 2, _streams(seeds, positions, tokens.device)[:, owners])
    return _to_uniform(words.gather(1, (tokens & 3).unsqueeze(1)).squeeze(1))


def uniform_vocabulary(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> Tensor:
    """The uniform numbers of all tokens in rows of these seeds and positions: float32 [rows, vocab_size]."""
    blocks = torch.arange((vocab_size + 3) // 4, device=device).unsqueeze(0)
    words = _words(blocks, _streams(seeds, positions, device).unsqueeze(-1))
    return _to_uniform(words.flatten(1)[:, :vocab_size])


def gumbel(uniforms: Tensor) -> Tensor:
    """Standard Gumbel noise, in the precision of `uniforms`. In float32 it is right to within 1e-5."""
    return -torch.log(-torch.log1p(-uniforms))


def gumbel_exact(value: float) -> float:
    """Standard Gumbel noise of one uniform number, in float64."""
    return -math.log(-math.log1p(-value))


def _streams(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """What selects a row's numbers: int64 [4, rows], low and high halves of its seed and of its position."""
    wide = np.array([[value % 2**64 for value in seeds], positions], dtype=np.uint64)
    halves = np.stack(
        (wide & np.uint64(_WORD), wide >> np.uint64(32)), axis=1
    )  # [seed or position, half, row]
    return torch.from_numpy(halves.view(np.int64)).flatten(0, 1).to(device)


def _words(blocks: Tensor, streams: Tensor) -> Tensor:
    """The four words of every block, along a new last axis, in int64; `streams` [4, ..] broadcasts."""
    seed_low, seed_high, position_low, position_high = streams
    inputs = (blocks, position_low, position_high, torch.zeros_like(position_low), seed_low, seed_high)
    if blocks.device.type != "cpu":
        return torch.stack(philox4x32(inputs[:4], inputs[4:]), -1)
    arrays = tuple(part.numpy().view(np.uint64) for part in inputs)
    words = philox4x32(arrays[:4], arrays[4:])
    return torch.from_numpy(np.stack(words, -1).view(np.int64))


def _to_uniform(words: Tensor) -> Tensor:
    values = words.to(torch.float64) + 0.5
    values.view(torch.int64).bitwise_and_(-(1 << 29))  # of float64's 52 fraction bits float32 has 23
    return (values * 2.0**-32).to(torch.float32)
