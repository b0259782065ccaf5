"""A small model of North's shape, recomputed for every token, and what engines over it are asked."""

from __future__ import annotations

import random

import torch

from headrace.engine.engine import Engine
from headrace.engine.request import Output
from headrace.model.config import DenseMLP, LayerConfig, ModelConfig, MoEMLP, Norm, Rope
from headrace.model.sampling import SamplingParams
from headrace.model.transformer import Model

VOCABULARY = 320
WINDOW = 70


def north(window: int = WINDOW) -> ModelConfig:
    """North's shape, scaled down."""
    moe = MoEMLP(width=32, experts=4, top_k=2)
    return ModelConfig(
        family="cohere2_moe",
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        layers=(
            LayerConfig(window=None, rope=Rope.INTERLEAVED, mlp=DenseMLP(width=64)),
            LayerConfig(window=window, rope=Rope.INTERLEAVED, mlp=moe),
            LayerConfig(window=None, rope=Rope.NONE, mlp=moe),
        ),
        parallel_block=True,
        norm=Norm.RMS,
        norm_eps=1e-6,
        rope_theta=50000.0,
        max_positions=1024,
        tied_head=False,  # with random weights a tied head only ever repeats the last token
    )


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The continuation by recomputing the whole sequence for every token; not one token over and over."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model.full(torch.tensor([tokens]))[0, -1].argmax()))
    made = tokens[len(prompt) :]
    assert count < 4 or len(set(made)) > 2
    return made


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Ragged prompts, some longer than the window and several blocks."""
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCABULARY) for _ in range(generator.choice([1, 5, 63, 64, 65, 90, 200]))]
        for _ in range(count)
    ]


def generate(engine: Engine, requests: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs: list[list[Output]] = [[] for _ in requests]
    for prompt, one, sink in zip(requests, params, outputs, strict=True):
        engine.submit(prompt, one, sink.append)
    while engine.step():
        pass
    engine.check()
    return [[token for output in sink for token in output.token_ids] for sink in outputs]
