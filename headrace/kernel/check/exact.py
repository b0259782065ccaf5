"""A model in float32 beside its own half-precision weights, which may leave no room for a second copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.build import build_model
from headrace.model.config import ModelConfig
from headrace.model.transformer import Model


def float32_model(config: ModelConfig, weight: Callable[[str], Tensor]) -> Model:
    """What is meant by weights of any type: nothing that the model computes is rounded to less than float32.

    `weight` gives a parameter by its name in the model. A layer's are there in float32 only while it runs.
    """
    model = build_model(config, device="meta", dtype=torch.float32)
    within = {
        f"blocks.{layer}.{name}"
        for layer, block in enumerate(model.blocks)
        for name, _ in block.named_parameters()
    }
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(_fills(f"blocks.{layer}.", weight))
        block.register_forward_hook(_empties)
    outside = [name for name, _ in model.named_parameters() if name not in within]
    model.load_state_dict({name: weight(name).float() for name in outside}, strict=False, assign=True)
    return model


def _fills(prefix: str, weight: Callable[[str], Tensor]) -> Callable[[nn.Module, Any], None]:
    def hook(block: nn.Module, inputs: Any) -> None:
        names = [name for name, _ in block.named_parameters()]
        block.load_state_dict({name: weight(prefix + name).float() for name in names}, assign=True)

    return hook


def _empties(block: nn.Module, inputs: Any, output: Any) -> None:
    block.to("meta")
