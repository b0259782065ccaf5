"""Sampling written down a second time, slowly and plainly, from the documented semantics.

One token at a time. The slow functions share no code with `headrace.model`: Philox on integers, filters by
sorting everything, and exact distributions to test frequencies against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from headrace.model.sampler import SampleRow, sample
from headrace.model.sampling import SamplingParams

f32 = np.float32
GREEDY = SamplingParams(temperature=0)


def row(params: SamplingParams = GREEDY, **fields: Any) -> SampleRow:
    values: dict[str, Any] = {"seed": 1, "position": 5, "prompt": [0], "output": []}
    return SampleRow(params=params, **(values | fields))


def tokens_of(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [item.token for item in sample(logits, rows)]


def slow_philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 as in the paper's figure: S-boxes by 32 x 32 bit products, then the Weyl key schedule."""
    left0, right0, left1, right1 = counter
    key0, key1 = key
    for round_number in range(10):
        round_key0 = (key0 + round_number * 0x9E3779B9) % 2**32
        round_key1 = (key1 + round_number * 0xBB67AE85) % 2**32
        high0, low0 = divmod(left0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(left1 * 0xCD9E8D57, 2**32)
        left0, right0, left1, right1 = high1 ^ right0 ^ round_key0, low1, high0 ^ right1 ^ round_key1, low0
    return [left0, right0, left1, right1]


def slow_uniform(seed: int, position: int, token: int) -> Fraction:
    counter = [token // 4, position % 2**32, position // 2**32, 0]
    word = slow_philox(counter, [seed % 2**32, seed // 2**32])[token % 4]
    doubled = 2 * word + 1  # (word + 1/2) / 2^32 is this over 2^33
    excess = max(0, doubled.bit_length() - 24)
    return Fraction(doubled >> excess << excess, 2**33)


def slow_scores(logits: Sequence[float], row: SampleRow) -> list[np.float32]:
    """Steps 1 to 3; at temperature 0 just the adjusted logits."""
    params = row.params
    values = [f32(value) for value in logits]
    for token in {*row.prompt, *row.output}:
        penalty = f32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(row.output):
        values[token] -= f32(row.output.count(token)) * f32(params.frequency_penalty)
        values[token] -= f32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        values[token] += f32(bias)
    if params.temperature < 1e-5:
        return values
    best = max(values)
    return [(value - best) / f32(params.temperature) for value in values]


def slow_kept(scores: Sequence[np.float32], params: SamplingParams) -> list[int]:
    """Steps 4 to 6."""
    ids = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        weights = [int(math.exp(scores[token]) * 2**44) for token in ids]
        reached = 0
        for count, weight in enumerate(weights, start=1):
            reached += weight
            if reached >= Fraction(params.top_p) * sum(weights):
                ids = ids[:count]
                break
    if params.min_p:
        ids = [token for token in ids if scores[token] >= f32(math.log(params.min_p))]
    return ids


def slow_sample(logits: Sequence[float], row: SampleRow) -> int:
    scores = slow_scores(logits, row)
    if row.params.temperature < 1e-5:
        return scores.index(max(scores))

    def noisy(token: int) -> float:
        uniform = float(slow_uniform(row.seed, row.position, token))
        return float(scores[token]) - math.log(-math.log1p(-uniform))

    return max(slow_kept(scores, row.params), key=lambda token: (noisy(token), -token))


def probabilities(logits: Sequence[float], row: SampleRow) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The distribution that draws must follow, [vocab]."""
    scores = slow_scores(logits, row)
    result = np.zeros(len(scores))
    for token in slow_kept(scores, row.params):
        result[token] = math.exp(scores[token])
    result /= result.sum()
    return result
