"""Llamas of other sizes than `headrace.step.oracle.world`'s, small ones and those that there are."""

from __future__ import annotations

from dataclasses import replace

from headrace.model.config import DenseMLP
from headrace.model.presets import PRESETS
from headrace.step.oracle.world import llama

MANY_HEADS = "a head for each KV head, more of these than two rounds of lanes"
SHAPES = {
    MANY_HEADS: llama(8, 8, 32),
    "eight heads of 128 a KV head, a tied head": llama(8, 1, 128, tied_head=True),
}
# 4,096 columns are too many to be held beside the norm.
WIDE = replace(llama(2, 1, 64), hidden_size=4096, layers=llama().layers[:1])

_LLAMA_1B = PRESETS["llama-3.2-1b"]
LLAMA_3B = replace(
    _LLAMA_1B,
    hidden_size=3072,
    num_heads=24,
    head_dim=128,
    layers=(replace(_LLAMA_1B.layers[0], mlp=DenseMLP(width=8192)),) * 28,
)
LLAMA_8B = replace(
    _LLAMA_1B,
    hidden_size=4096,
    head_dim=128,
    layers=(replace(_LLAMA_1B.layers[0], mlp=DenseMLP(width=14336)),) * 32,
    tied_head=False,
)
