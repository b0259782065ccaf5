"""Cohere2MoE, the family of North Mini Code.

A parallel block: one norm feeds attention and feed-forward, and both are added to the residual stream
together. Which layers slide, which see positions and which are dense is the configuration's to say. In North
every fourth layer, from the first on, attends to the whole past; positions reach the sliding layers and the
dense first layer only.
"""

from __future__ import annotations

from torch import Tensor

from headrace.model.attention import Attention, AttentionPass
from headrace.model.config import ModelConfig
from headrace.model.layers import make_mlp, make_norm, on_gpu
from headrace.model.transformer import Block, Model


class ParallelBlock(Block):
    """x + attention(h) + mlp(h) with h = norm(x)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp = make_mlp(config.hidden_size, config.layers[layer].mlp)

    def forward(self, x: Tensor, tokens: AttentionPass, *, ends: bool = False) -> Tensor:
        h = self.norm(x)
        if ends:
            self.attention.write(h, tokens)
            return x
        attended, fed = self.attention(h, tokens), self.mlp(h)
        if self.fused is not None and on_gpu(x):
            return self.fused.add(x, attended, fed)
        out: Tensor = x + attended + fed
        return out


class Cohere2Moe(Model):
    """A stack of parallel blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, [ParallelBlock(config, layer) for layer in range(config.num_layers)])
