"""Small models for tests of the step, and random ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from headrace.model.config import DenseMLP, LayerConfig, ModelConfig, MoEMLP, Norm, Rope
from headrace.model.presets import NORTH_MICRO_SHAPE, north_layers

TINY = replace(
    NORTH_MICRO_SHAPE,
    vocab_size=100,  # not whole tiles
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    layers=north_layers(5, window=128, dense=DenseMLP(width=96), routed=MoEMLP(width=32, experts=6, top_k=2)),
    max_positions=1024,
)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Models of every kind that a plan exists for, a few layers deep."""
    head_dim = draw(st.sampled_from([16, 32, 48, 64, 128]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if head_dim * kv_heads * group % 32:
        group *= 2
    parallel = draw(st.booleans())
    pairing = Rope.INTERLEAVED if parallel else Rope.HALF_SPLIT
    window = draw(st.integers(1, 200))
    layers = [
        LayerConfig(
            window=draw(st.sampled_from([None, window])),
            rope=draw(st.sampled_from([Rope.NONE, pairing])),
            mlp=draw(_feed_forwards()),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return ModelConfig(
        family="cohere2_moe" if parallel else "llama",
        vocab_size=draw(st.integers(1, 400)),
        hidden_size=32 * draw(st.integers(1, 8)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(layers),
        parallel_block=parallel,
        norm=draw(st.sampled_from(list(Norm))),
        norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=2048,
        tied_head=draw(st.booleans()),
    )


@st.composite
def _feed_forwards(draw: st.DrawFn) -> DenseMLP | MoEMLP:
    width = 32 * draw(st.integers(1, 6))
    if draw(st.booleans()):
        return DenseMLP(width=width)
    experts = draw(st.integers(1, 20))
    return MoEMLP(
        width=width,
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        normalize=draw(st.booleans()),
        shared_experts=draw(st.integers(0, 2)),
        shared_sum=draw(st.booleans()),
    )
