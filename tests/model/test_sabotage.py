"""Each detail that other implementations got wrong, got wrong on purpose: the comparison must notice.

Most sabotages change the description of the model, so that the layers do something else with the same
weights; the others replace one function. The list was gathered from the bug reports of mlx-lm, llama.cpp,
ollama and other public projects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headrace.model import layers, rope
from headrace.model.build import build_model
from headrace.model.checkpoint import CheckpointError, check_tensors, fill, read_config
from headrace.model.cohere2_moe import ParallelBlock
from headrace.model.config import DenseMLP, LayerConfig, ModelConfig, MoEMLP, Norm, Rope
from headrace.model.layers import Experts, RMSNorm
from headrace.model.llama import SequentialBlock
from headrace.model.names import hugging_face_names
from headrace.model.shards import SafetensorsFolder
from headrace.model.transformer import Model
from tests.model.conftest import MakeReference
from tests.model.reference import LLAMA3_ROPE, Paged, assert_same_logits

Patch = pytest.MonkeyPatch
PARTS = [100, 1, 64, 1, 44]


def load_as(folder: Path, config: ModelConfig) -> Model:
    """The weights of a folder in a model that the folder's own config does not describe."""
    source = SafetensorsFolder(folder)
    names = hugging_face_names(config, source.shapes.keys())
    check_tensors(folder, names, source)
    model = build_model(config, device="cpu", dtype=torch.float32)
    fill(model, names, source, None)
    return model


def every_layer(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    return replace(config, layers=tuple(change(layer) for layer in config.layers))


def every_rope(config: ModelConfig, pick: Callable[[LayerConfig], Rope]) -> ModelConfig:
    return every_layer(config, lambda layer: replace(layer, rope=pick(layer)))


def routed(config: ModelConfig, **fields: Any) -> ModelConfig:
    """The same with other fields in every routed feed-forward."""
    return every_layer(
        config,
        lambda layer: (
            replace(layer, mlp=replace(layer.mlp, **fields)) if isinstance(layer.mlp, MoEMLP) else layer
        ),
    )


def slide_other_layers(config: ModelConfig) -> ModelConfig:
    """Full attention at layers 3, 7, ... instead of 0, 4, 8, ...; rope follows."""
    first, *rest = config.layers
    sliding = next(layer for layer in rest if layer.window is not None)
    whole = next(layer for layer in rest if layer.window is None)
    pattern = [sliding if (index + 1) % 4 else whole for index in range(1, config.num_layers)]
    return replace(config, layers=(first, *pattern))


# Each takes the right config to a wrong one.
ConfigChange = Callable[[ModelConfig], ModelConfig]
NORTH_CHANGES: dict[str, ConfigChange] = {
    "rope on every layer": lambda c: every_rope(c, lambda layer: Rope.INTERLEAVED),
    "no rope on the dense first layer": lambda c: every_rope(
        c, lambda layer: Rope.NONE if isinstance(layer.mlp, DenseMLP) else layer.rope
    ),
    "no rope on sliding layers": lambda c: every_rope(
        c, lambda layer: Rope.NONE if layer.window else layer.rope
    ),
    "rope on full layers, none on sliding ones": lambda c: every_rope(
        c, lambda layer: Rope.NONE if layer.window else Rope.INTERLEAVED
    ),
    "half-split instead of interleaved pairs": lambda c: every_rope(
        c, lambda layer: Rope.NONE if layer.rope is Rope.NONE else Rope.HALF_SPLIT
    ),
    "another rope base": lambda c: replace(c, rope_theta=10000.0),
    "window does not count the token itself": lambda c: every_layer(
        c, lambda layer: replace(layer, window=layer.window and layer.window + 1)
    ),
    "window one too small": lambda c: every_layer(
        c, lambda layer: replace(layer, window=layer.window and layer.window - 1)
    ),
    "no window": lambda c: every_layer(c, lambda layer: replace(layer, window=None)),
    "other layers slide": slide_other_layers,
    "weights normalised": lambda c: routed(c, normalize=True),
    "one expert too few": lambda c: routed(c, top_k=3),
    "LayerNorm": lambda c: replace(c, norm=Norm.LAYER),
    "layer_norm_eps instead of rms_norm_eps": lambda c: replace(c, norm_eps=1e-5),
    "logit scale left at the class's default": lambda c: replace(c, logit_scale=0.0625),
}


@pytest.mark.parametrize("change", NORTH_CHANGES.values(), ids=NORTH_CHANGES)
def test_north_described_wrongly(change: ConfigChange, reference: MakeReference) -> None:
    theirs = reference("cohere2_moe")
    right = read_config(theirs.folder)
    assert change(right) != right
    must_differ(load_as(theirs.folder, change(right)), theirs.tokens, theirs.logits)


SHARED: dict[str, Any] = {"num_shared_experts": 2, "norm_topk_prob": True, "rms_norm_eps": None}
SHARED_CHANGES: dict[str, ConfigChange] = {
    "shared experts added, not averaged": lambda c: routed(c, shared_sum=True),
    "weights not normalised": lambda c: routed(c, normalize=False),
    "RMSNorm": lambda c: replace(c, norm=Norm.RMS),
}


@pytest.mark.parametrize("change", SHARED_CHANGES.values(), ids=SHARED_CHANGES)
def test_other_options_described_wrongly(change: ConfigChange, reference: MakeReference) -> None:
    theirs = reference("cohere2_moe", **SHARED)
    assert_same_logits(load_as(theirs.folder, read_config(theirs.folder)).full(theirs.tokens), theirs.logits)
    must_differ(load_as(theirs.folder, change(read_config(theirs.folder))), theirs.tokens, theirs.logits)


def test_shared_experts_averaged_where_they_are_summed(reference: MakeReference) -> None:
    theirs = reference("cohere2_moe", num_shared_experts=1, shared_expert_combination_strategy="sum")
    wrong = routed(read_config(theirs.folder), shared_sum=False)
    must_differ(load_as(theirs.folder, wrong), theirs.tokens, theirs.logits)


# Weights that a wrong description has no place for: the loader is the gate.
LOADER_CHANGES: dict[str, tuple[dict[str, Any], ConfigChange, str]] = {
    "head width is hidden / heads": ({}, lambda c: replace(c, head_dim=8), "q_proj.weight .* has shape"),
    "first layer routed": (
        {},
        lambda c: replace(c, layers=(replace(c.layers[0], mlp=c.layers[1].mlp), *c.layers[1:])),
        "missing tensors: model.layers.0.mlp.experts",
    ),
    "a shared expert where there is none": (
        {},
        lambda c: routed(c, shared_experts=1),
        "missing tensors: .*shared_experts",
    ),
    "shared experts forgotten": (
        SHARED,
        lambda c: routed(c, shared_experts=0),
        "unexpected tensors: .*shared_experts",
    ),
    "a norm before the feed-forward": (
        {},
        lambda c: replace(c, parallel_block=False),
        "missing tensors: .*post_attention_layernorm",
    ),
    "a head of its own": ({}, lambda c: replace(c, tied_head=False), "missing tensors: lm_head.weight"),
}


@pytest.mark.parametrize(("fields", "change", "message"), LOADER_CHANGES.values(), ids=LOADER_CHANGES)
def test_the_loader_refuses(
    fields: dict[str, Any], change: ConfigChange, message: str, reference: MakeReference
) -> None:
    theirs = reference("cohere2_moe", **fields)
    with pytest.raises(CheckpointError, match=message):
        load_as(theirs.folder, change(read_config(theirs.folder)))


def scale_by_hidden_over_heads(patch: Patch, model: Model) -> None:
    """Scores scaled by hidden / heads, which is not the head size here."""
    right: Any = functional.scaled_dot_product_attention
    wrong = (model.config.hidden_size / model.config.num_heads) ** -0.5

    def scaled(*args: Any, **options: Any) -> Any:
        return right(*args, **options, scale=wrong)

    patch.setattr(functional, "scaled_dot_product_attention", scaled)


def route_by(choose: Callable[[Tensor, MoEMLP], tuple[Tensor, Tensor]]) -> Callable[[Patch, Model], None]:
    return lambda patch, model: patch.setattr(layers, "route", choose)


def softmax_of_chosen(logits: Tensor, mlp: MoEMLP, fused: object = None) -> tuple[Tensor, Tensor]:
    top = logits.topk(mlp.top_k)
    return top.indices, top.values.softmax(-1)


def raw_logits(logits: Tensor, mlp: MoEMLP, fused: object = None) -> tuple[Tensor, Tensor]:
    top = logits.topk(mlp.top_k)
    return top.indices, top.values


def sigmoid_of_magnitude(logits: Tensor, mlp: MoEMLP, fused: object = None) -> tuple[Tensor, Tensor]:
    chosen = logits.abs().topk(mlp.top_k).indices
    return chosen, logits.gather(-1, chosen).sigmoid()


def lowest_logits(logits: Tensor, mlp: MoEMLP, fused: object = None) -> tuple[Tensor, Tensor]:
    top = logits.topk(mlp.top_k, largest=False)
    return top.indices, top.values.sigmoid()


def up_before_gate(patch: Patch, model: Model) -> None:
    """The halves of the fused tensor the other way round."""
    for module in model.modules():
        if isinstance(module, Experts):
            width = module.down.shape[-1]
            module.gate_up.copy_(module.gate_up.roll(width, dims=1))


def feed_forward_without_norm(patch: Patch, model: Model) -> None:
    def forward(block: ParallelBlock, x: Tensor, tokens: Any) -> Tensor:
        out: Tensor = x + block.attention(block.norm(x), tokens) + block.mlp(x)
        return out

    patch.setattr(ParallelBlock, "forward", forward)


def router_without_norm(patch: Patch, model: Model) -> None:
    """The experts read the normalised input, the router the residual stream."""
    seen: list[Tensor] = []
    norm, logits = RMSNorm.forward, layers.MoE.router_logits

    def remember(module: RMSNorm, x: Tensor) -> Tensor:
        seen[:] = [x]
        return norm(module, x)

    patch.setattr(RMSNorm, "forward", remember)
    patch.setattr(layers.MoE, "router_logits", lambda module, h: logits(module, seen[0].flatten(0, -2)))


def one_after_the_other(patch: Patch, model: Model) -> None:
    """The feed-forward reads what attention has added to."""

    def forward(block: ParallelBlock, x: Tensor, tokens: Any) -> Tensor:
        x = x + block.attention(block.norm(x), tokens)
        out: Tensor = x + block.mlp(block.norm(x))
        return out

    patch.setattr(ParallelBlock, "forward", forward)


def no_residual_of_attention(patch: Patch, model: Model) -> None:
    def forward(block: ParallelBlock, x: Tensor, tokens: Any) -> Tensor:
        h = block.norm(x)
        out: Tensor = block.attention(h, tokens) + block.mlp(h)
        return out

    patch.setattr(ParallelBlock, "forward", forward)


def norm_without_weight(patch: Patch, model: Model) -> None:
    for name, parameter in model.named_parameters():
        if name == "norm.weight":
            parameter.fill_(1)


CODE_CHANGES: dict[str, Callable[[Patch, Model], None]] = {
    "scores scaled by hidden / heads": scale_by_hidden_over_heads,
    "softmax instead of sigmoid": route_by(softmax_of_chosen),
    "raw logits as weights": route_by(raw_logits),
    "choice by magnitude": route_by(sigmoid_of_magnitude),
    "lowest instead of highest": route_by(lowest_logits),
    "up before gate": up_before_gate,
    "feed-forward reads the residual stream": feed_forward_without_norm,
    "router reads the residual stream": router_without_norm,
    "attention before feed-forward": one_after_the_other,
    "no residual stream": no_residual_of_attention,
    "last norm without its weight": norm_without_weight,
}


@pytest.mark.parametrize("change", CODE_CHANGES.values(), ids=CODE_CHANGES)
def test_north_computed_wrongly(
    change: Callable[[Patch, Model], None], reference: MakeReference, monkeypatch: Patch
) -> None:
    theirs = reference("cohere2_moe")
    model = load_as(theirs.folder, read_config(theirs.folder))
    assert_same_logits(model.full(theirs.tokens), theirs.logits)
    with torch.no_grad():
        change(monkeypatch, model)
    must_differ(model, theirs.tokens, theirs.logits)


def feed_forward_before_second_norm(patch: Patch, model: Model) -> None:
    def forward(block: SequentialBlock, x: Tensor, tokens: Any) -> Tensor:
        h = block.attention_norm(x)
        out: Tensor = x + block.attention(h, tokens) + block.mlp(block.mlp_norm(x))
        return out

    patch.setattr(SequentialBlock, "forward", forward)


def every_frequency_slowed(patch: Patch, model: Model) -> None:
    """Llama 3's scaling taken for the plain linear one."""
    patch.setattr(rope, "stretch", lambda plain, scaling: plain / scaling.factor)
    model._frequencies = None


LLAMA_CODE_CHANGES = {
    "parallel instead of sequential": feed_forward_before_second_norm,
    "all frequencies slowed": every_frequency_slowed,
}
LLAMA_CHANGES: dict[str, ConfigChange] = {
    "interleaved instead of half-split pairs": lambda c: every_rope(c, lambda layer: Rope.INTERLEAVED),
    "rope not scaled": lambda c: replace(c, rope_scaling=None),
    "other norm": lambda c: replace(c, norm=Norm.LAYER),
    "other eps": lambda c: replace(c, norm_eps=1e-6),
}


@pytest.mark.parametrize("change", LLAMA_CHANGES.values(), ids=LLAMA_CHANGES)
def test_llama_described_wrongly(change: ConfigChange, reference: MakeReference) -> None:
    theirs = reference("llama", rope_parameters=LLAMA3_ROPE)
    must_differ(load_as(theirs.folder, change(read_config(theirs.folder))), theirs.tokens, theirs.logits)


@pytest.mark.parametrize("change", LLAMA_CODE_CHANGES.values(), ids=LLAMA_CODE_CHANGES)
def test_llama_computed_wrongly(
    change: Callable[[Patch, Model], None], reference: MakeReference, monkeypatch: Patch
) -> None:
    theirs = reference("llama", rope_parameters=LLAMA3_ROPE)
    model = load_as(theirs.folder, read_config(theirs.folder))
    assert_same_logits(model.full(theirs.tokens), theirs.logits)
    change(monkeypatch, model)
    must_differ(model, theirs.tokens, theirs.logits)


def must_differ(model: Model, tokens: Tensor, logits: Tensor) -> None:
    """The comparison goes red without a cache and with one."""
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_same_logits(model.full(tokens), logits)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_same_logits(Paged(model).sequence(tokens[0].tolist(), PARTS), logits[0])
