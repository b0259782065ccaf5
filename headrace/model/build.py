"""From a description to a model."""

from __future__ import annotations

import torch

from headrace.model.cohere2_moe import Cohere2Moe
from headrace.model.config import ModelConfig
from headrace.model.llama import Llama
from headrace.model.transformer import Model


def build_model(config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype) -> Model:
    """A model of this shape whose weights are allocated once, on `device`, and hold nothing yet.

    On the device "meta" nothing is allocated at all: a way to count and name the parameters.
    """
    with torch.device("meta"):
        model = Cohere2Moe(config) if config.parallel_block else Llama(config)
    return model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
