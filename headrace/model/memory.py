"""How much memory a model needs, and how much of it a token reads. Nothing is allocated to find out."""

from __future__ import annotations

import torch

from headrace.model.build import build_model
from headrace.model.config import KVGroup, ModelConfig, MoEMLP
from headrace.model.kv import BLOCK_TOKENS, block_bytes, blocks_for


def parameter_count(config: ModelConfig) -> int:
    """All parameters; a tied head is the embedding and counts once."""
    model = build_model(config, device="meta", dtype=torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def active_parameter_count(config: ModelConfig) -> int:
    """The parameters that one token alone reads: of the experts, the ones it is routed to; and the head.

    With an untied head the embedding, of which a token reads one row, is left out.
    """
    idle = 0 if config.tied_head else config.vocab_size * config.hidden_size
    for layer in config.layers:
        if isinstance(layer.mlp, MoEMLP):
            idle += (layer.mlp.experts - layer.mlp.top_k) * 3 * layer.mlp.width * config.hidden_size
    return parameter_count(config) - idle


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights."""
    return parameter_count(config) * dtype.itemsize


def kv_bytes_per_token(config: ModelConfig, group: KVGroup, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token, over all layers of the group."""
    return block_bytes(config, group, dtype.itemsize) // BLOCK_TOKENS


def prompt_bytes(config: ModelConfig, *, tokens: int, context: int, dtype: torch.dtype) -> int:
    """About how many bytes a pass over `tokens` tokens of a prompt needs at once beside weights and KV pages.

    What it holds in a layer of attention, with all K and V of `context` tokens laid out and up to 16 parts of
    the result (`tiled`), or in a routed feed-forward, whichever is more.
    """
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = tokens * (19 * heads + 6 * kv) + 2 * context * kv
    forward = [
        tokens * layer.mlp.top_k * (2 * config.hidden_size + 3 * layer.mlp.width)
        if isinstance(layer.mlp, MoEMLP)
        else tokens * 4 * layer.mlp.width
        for layer in config.layers
    ]
    return (4 * tokens * config.hidden_size + max(attention, *forward)) * dtype.itemsize


def kv_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the blocks that one sequence of `tokens` tokens holds while it is decoded, one step at a time.

    Sliding layers hold a window, which can begin in the middle of a block and so touch one block more.
    """
    total = 0
    for group in KVGroup:
        blocks = blocks_for(tokens)
        if group is KVGroup.SLIDING and config.window is not None:
            blocks = min(blocks, blocks_for(config.window - 1) + 1)
        total += blocks * block_bytes(config, group, dtype.itemsize)
    return total
