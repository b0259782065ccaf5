"""Rotary position embedding: pairs of elements of a head turn by an angle that grows with the position.

RoFormer (Su et al., 2021, arXiv 2104.09864). Two ways to pair the elements are in use, see `config.Rope`. All
angles and rotations are float32 whatever the activations are, and the tables are never rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.config import ModelConfig, Rope, RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of every angle of the tokens of one pass, float32, each [tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    plain = 1.0 / config.rope_theta**exponent
    return plain if config.rope_scaling is None else stretch(plain, config.rope_scaling)


def stretch(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's frequencies for contexts longer than the ones of pre-training (Llama 3.1 model card).

    Pairs that turn often within the original context keep their frequency, those that turn rarely are slowed
    down by `factor`, and between the two bounds the frequency is interpolated.
    """
    turns = scaling.original_max_position * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def rotation(positions: Tensor, frequencies: Tensor) -> Rotation:
    """The tables for integer `positions` [tokens]."""
    angles = positions.float()[:, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, pairs: Rope, by: Rotation) -> Tensor:
    """Turn x [..., tokens, heads, head_dim] in the given pairing; the result has x's type."""
    if pairs is Rope.NONE:
        return x
    cos, sin = by.cos[:, None], by.sin[:, None]
    wide = x.float()
    if pairs is Rope.INTERLEAVED:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = wide.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned.to(x.dtype)
