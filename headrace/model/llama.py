"""Llama, the family of SmolLM2 and Llama 3.x: attention, then feed-forward, each with a norm before it."""

from __future__ import annotations

from torch import Tensor

from headrace.model.attention import Attention, AttentionPass
from headrace.model.config import ModelConfig
from headrace.model.layers import make_mlp, make_norm
from headrace.model.transformer import Block, Model


class SequentialBlock(Block):
    """y = x + attention(norm(x)), then y + mlp(norm(y))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config.hidden_size, config.layers[layer].mlp)

    def forward(self, x: Tensor, tokens: AttentionPass, *, ends: bool = False) -> Tensor:
        h = self.attention_norm(x)
        if ends:
            self.attention.write(h, tokens)
            return x
        x = x + self.attention(h, tokens)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(Model):
    """A stack of sequential blocks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, [SequentialBlock(config, layer) for layer in range(config.num_layers)])
