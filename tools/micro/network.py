"""North Micro's shape, its initial weights, and a differentiable pass that is fast enough to train with.

The pass runs the parts of `headrace.model` themselves, apart from two that are written for throughput and
tested equal to them: all experts at once as one wide feed-forward, and the window in blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.attention import WholeSequences, visible
from headrace.model.cohere2_moe import ParallelBlock
from headrace.model.config import ModelConfig, MoEMLP
from headrace.model.hf_config import parse_config
from headrace.model.layers import MoE, route
from headrace.model.rope import Rotation, frequencies, rotation
from headrace.model.transformer import Model

MAX_POSITIONS = 4096


def hugging_face_config(vocab_size: int, end_of_turn: int, bos: int, pad: int) -> dict[str, object]:
    """config.json of North Micro, in the fields that North's own file has."""
    return {
        "architectures": ["Cohere2MoeForCausalLM"],
        "model_type": "cohere2_moe",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 0,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 256,
        "prefix_dense_sliding_window_pattern": 1,
        "sliding_window_pattern": 4,
        "sliding_window": 256,
        "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(12)],
        "use_parallel_block": True,
        "use_qk_norm": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "rope_theta": 50000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "pad_token_id": pad,
        "bos_token_id": bos,
        "eos_token_id": end_of_turn,
        "torch_dtype": "bfloat16",
    }


def micro_config(vocab_size: int) -> ModelConfig:
    """The same as our own configuration."""
    return parse_config(hugging_face_config(vocab_size, 3, 1, 0))


def initialize(model: Model, seed: int) -> None:
    """Normal weights that keep the size of what flows through, smaller into the residual stream."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    depth = (2 * model.config.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        deviation = parameter.shape[-1] ** -0.5
        if name.startswith("embed") or "router" in name:
            deviation = 0.05
        elif name.endswith(("attention.o.weight", "down", "down.weight")):
            deviation *= depth
        nn.init.normal_(parameter, std=deviation, generator=generator)


class BlockedSequences(WholeSequences):
    """WholeSequences with the sliding layers in blocks: a block sees itself and the one before."""

    def __init__(self, config: ModelConfig, time: int, turned: Rotation) -> None:
        super().__init__(config, time, turned)
        window = config.window
        self.window = 0 if window is None or time <= window else window
        if not self.window:
            return
        if time % self.window:
            raise ValueError(f"train on sequences of a multiple of {self.window} tokens, not {time}")
        at = torch.arange(2 * self.window, device=turned.cos.device)
        mask = visible(at[self.window :], at, self.window).repeat(time // self.window, 1, 1)
        mask[0, :, : self.window] = False  # nothing comes before the first block
        self.blocks = mask[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.window or self.layers[layer].window is None:
            return super().attend(layer, q, k, v)
        batch, time, heads, _ = q.shape
        repeats = heads // k.shape[-2]
        q = q.reshape(-1, self.window, heads, q.shape[-1]).transpose(1, 2)
        k, v = (self._with_previous(x).repeat_interleave(repeats, dim=1) for x in (k, v))
        mask = self.blocks.repeat(batch, 1, 1, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).reshape(batch, time, heads, -1)

    def _with_previous(self, x: Tensor) -> Tensor:
        """[batch, time, heads, dim] to [batch * blocks, heads, 2 * window, dim]: two blocks each."""
        x = x.view(len(x), -1, self.window, *x.shape[2:])
        before = functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat((before, x), dim=2).flatten(0, 1).transpose(1, 2)


def all_experts(moe: MoE, h: Tensor, logits: Tensor) -> Tensor:
    """The routed feed-forward of h [tokens, hidden], computed for every expert and weighed with zeros."""
    mlp = moe.mlp
    ids, weights = route(logits, mlp)
    share = torch.zeros_like(logits).scatter(1, ids, weights).to(h.dtype)
    gate, up = (part.flatten(0, 1) for part in moe.experts.gate_up.chunk(2, dim=1))
    inner = functional.silu(functional.linear(h, gate)) * functional.linear(h, up)
    inner = inner.view(-1, mlp.experts, mlp.width) * share.to(inner.dtype)[..., None]
    return functional.linear(inner.flatten(1), moe.experts.down.transpose(0, 1).flatten(1))


def balance_loss(logits: Tensor, mlp: MoEMLP) -> Tensor:
    """1 where all experts are used alike, `experts / top_k` where always the same are (Fedus et al., 2021).

    The share of tokens that choose an expert times its mean share of the scores, summed and scaled.
    """
    scores = logits.sigmoid()
    scores = (scores / scores.sum(-1, keepdim=True)).mean(0)
    chosen = logits.topk(mlp.top_k, dim=-1).indices
    used = torch.zeros_like(logits).scatter(1, chosen, 1.0).mean(0) / mlp.top_k
    return mlp.experts * (used * scores).sum()


class TrainingPass(NamedTuple):
    """Logits, float32 [batch, time, vocab], and the mean balance loss over the routed layers."""

    logits: Tensor
    balance: Tensor


class Trainee(nn.Module):
    """A model with dropout on what each half of a block adds, and with the faster parts above."""

    def __init__(self, model: Model, time: int, dropout: float) -> None:
        super().__init__()
        self.model = model
        self.dropout = dropout
        turned = rotation(torch.arange(time, device=model.device), frequencies(model.config, model.device))
        self.sequences = BlockedSequences(model.config, time, turned)

    def forward(self, tokens: Tensor) -> TrainingPass:
        x = self._drop(self.model.embed(tokens))
        balances = []
        for block in self.model.blocks:
            assert isinstance(block, ParallelBlock)
            h: Tensor = block.norm(x)
            if isinstance(block.mlp, MoE):
                flat = h.flatten(0, 1)
                logits = block.mlp.router_logits(flat)
                balances.append(balance_loss(logits, block.mlp.mlp))
                added = all_experts(block.mlp, flat, logits).view(h.shape)
            else:
                added = block.mlp(h)
            x = x + self._drop(block.attention(h, self.sequences)) + self._drop(added)
        return TrainingPass(self.model.logits(self.model.norm(x)), torch.stack(balances).mean())

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)
