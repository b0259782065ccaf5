"""Attention: projections and rotary embedding, and the plain attention of whole sequences without a cache.

How queries meet keys is left to an `AttentionPass`: `WholeSequences` here, which is differentiable, and
`paging.PagedSpans`, which reads and writes the paged cache. A layer is the same under both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.config import ModelConfig, Rope
from headrace.model.fused import Fused
from headrace.model.layers import linear, on_gpu
from headrace.model.rope import Rotation, rotate


class AttentionPass(Protocol):
    """What one pass through the model knows about its tokens."""

    rotation: Rotation

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What q [..., tokens, heads, dim] takes from k and v [..., tokens, KV heads, dim] and from the past.

        The result has q's shape. k and v are written.
        """

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep k and v for later passes, if there are any."""


class Attention(nn.Module):
    """Grouped-query attention of one layer (Ainslie et al., 2023); heads * head_dim may exceed hidden."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.fused: Fused | None = None
        self.layer = layer
        self.head_dim = config.head_dim
        self.rope = config.layers[layer].rope
        self.q = linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o = linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, h: Tensor, tokens: AttentionPass) -> Tensor:
        """h is [..., tokens, hidden], and so is the result."""
        q = self._turned(self.q(h).unflatten(-1, (-1, self.head_dim)), tokens.rotation)
        k, v = self._keys_and_values(h, tokens.rotation)
        out: Tensor = self.o(tokens.attend(self.layer, q, k, v).flatten(-2))
        return out

    def write(self, h: Tensor, tokens: AttentionPass) -> None:
        """What `forward` does for later passes."""
        tokens.write(self.layer, *self._keys_and_values(h, tokens.rotation))

    def _keys_and_values(self, h: Tensor, by: Rotation) -> tuple[Tensor, Tensor]:
        k, v = (made(h).unflatten(-1, (-1, self.head_dim)) for made in (self.k, self.v))
        return self._turned(k, by), v

    def _turned(self, x: Tensor, by: Rotation) -> Tensor:
        if self.fused is not None and self.rope is Rope.INTERLEAVED and x.dim() == 3 and on_gpu(x):
            return self.fused.rotate(x, by)
        return rotate(x, self.rope, by)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions [..., keys] each query position [..., queries] sees, bool [..., queries, keys].

    The past and the token itself; with a window, the last `window` of them: the token itself counts.
    """
    ahead = queries[..., :, None] - keys[..., None, :]
    seen = ahead >= 0
    return seen if window is None else seen & (ahead < window)


class WholeSequences:
    """A pass over sequences [batch, time], each from its first token on, without a cache."""

    def __init__(self, config: ModelConfig, time: int, rotation: Rotation) -> None:
        self.rotation = rotation
        self.layers = config.layers
        positions = torch.arange(time, device=rotation.cos.device)
        window = config.window
        self.band = None if window is None or time <= window else visible(positions, positions, window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.band if self.layers[layer].window is not None else None
        # Repeated KV heads rather than enable_gqa: with a mask the latter has no fused kernel.
        repeats = q.shape[-2] // k.shape[-2]
        k, v = (x.transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (k, v))
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None
        )
        return out.transpose(1, 2)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """There are no later passes."""
