"""The shapes of well-known models, for synthetic weights."""

from __future__ import annotations

from headrace.model.config import DenseMLP, LayerConfig, ModelConfig, MoEMLP, Norm, Rope, RopeScaling


def north_layers(
    layers: int, *, window: int, dense: DenseMLP, routed: MoEMLP, every: int = 4
) -> tuple[LayerConfig, ...]:
    """North's pattern.

    The first layer is dense and sees the whole past, with positions. Then every `every`-th layer sees the
    whole past without positions, and the others see a window of it with positions.
    """
    first = LayerConfig(window=None, rope=Rope.INTERLEAVED, mlp=dense)
    whole = LayerConfig(window=None, rope=Rope.NONE, mlp=routed)
    sliding = LayerConfig(window=window, rope=Rope.INTERLEAVED, mlp=routed)
    return (first, *(sliding if layer % every else whole for layer in range(1, layers)))


def _llama_layers(layers: int, width: int) -> tuple[LayerConfig, ...]:
    return (LayerConfig(window=None, rope=Rope.HALF_SPLIT, mlp=DenseMLP(width=width)),) * layers


NORTH_MINI_CODE = ModelConfig(
    family="cohere2_moe",
    vocab_size=262144,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    layers=north_layers(
        49, window=4096, dense=DenseMLP(width=3072), routed=MoEMLP(width=768, experts=128, top_k=8)
    ),
    parallel_block=True,
    norm=Norm.RMS,
    norm_eps=1e-6,
    rope_theta=50000.0,
    max_positions=500000,
    tied_head=True,
    eos_token_ids=(255001,),
)

# Small enough to run anywhere, large enough that every part of North's shape is there.
NORTH_MICRO_SHAPE = ModelConfig(
    family="cohere2_moe",
    vocab_size=4096,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=1,
    head_dim=128,
    layers=north_layers(
        9, window=256, dense=DenseMLP(width=384), routed=MoEMLP(width=128, experts=16, top_k=4)
    ),
    parallel_block=True,
    norm=Norm.RMS,
    norm_eps=1e-6,
    rope_theta=50000.0,
    max_positions=8192,
    tied_head=True,
)

SMOLLM2_135M = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    layers=_llama_layers(30, 1536),
    parallel_block=False,
    norm=Norm.RMS,
    norm_eps=1e-5,
    rope_theta=100000.0,
    max_positions=8192,
    tied_head=True,
    eos_token_ids=(2,),
)

LLAMA_3_2_1B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    layers=_llama_layers(16, 8192),
    parallel_block=False,
    norm=Norm.RMS,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    ),
    max_positions=131072,
    tied_head=True,
    eos_token_ids=(128001, 128008, 128009),
)

PRESETS = {
    "north-mini-code": NORTH_MINI_CODE,
    "north-micro-shape": NORTH_MICRO_SHAPE,
    "smollm2-135m": SMOLLM2_135M,
    "llama-3.2-1b": LLAMA_3_2_1B,
}
