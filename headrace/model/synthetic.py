"""Models with random weights, of any shape: what a checkpoint takes in memory and time, without one.

Weights are drawn so that activations keep the size that they have in trained models however deep the stack
is: each projection keeps the variance of its input, and those that write to the residual stream are smaller
by the square root of their number (as in GPT-2). Logits have a standard deviation of about LOGIT_SCALE.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from headrace.model.build import build_model
from headrace.model.config import ConfigError, ModelConfig
from headrace.model.presets import PRESETS
from headrace.model.progress import Progress, tracked
from headrace.model.transformer import Model

LOGIT_SCALE = 2.0
_WRITES_TO_RESIDUAL = ("attention.o.weight", "down.weight", "experts.down")


def preset(name: str) -> ModelConfig:
    """The config of a known shape. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"there is no shape called {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


@torch.no_grad()
def synthetic_model(
    shape: str | ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Model:
    """A model of the shape, a preset's name or a config, with random weights made on the device itself.

    The same seed gives the same weights on the same kind of device, not on different ones.
    Raises ConfigError for an unknown name.
    """
    config = preset(shape) if isinstance(shape, str) else shape
    model = build_model(config, device=device, dtype=dtype)
    places = dict(model.named_parameters())
    drawn = synthetic_parameters(
        config, seed=seed, device=device, dtype=dtype, progress=progress, places=places
    )
    for _ in drawn:
        pass
    return model


@torch.no_grad()
def synthetic_parameters(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    places: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of `synthetic_model` one by one, drawn in `places` or each in memory of its own."""
    shapes = dict(build_model(config, device="meta", dtype=dtype).named_parameters())
    generator = torch.Generator(device=device)
    with tracked(progress, "Making weights", sum(shape.nbytes for shape in shapes.values())) as advance:
        for index, (name, shape) in enumerate(shapes.items()):
            # A seed for each parameter, so that none depends on the sizes of those before it.
            generator.manual_seed(seed * len(shapes) + index)
            values = places[name] if places is not None else torch.empty_like(shape, device=device)
            initialize(name, values, config, generator)
            yield name, values
            advance(values.nbytes)


def initialize(name: str, parameter: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Draw one parameter in place."""
    if parameter.dim() == 1:  # the weight of a norm
        parameter.normal_(1.0, 0.1, generator=generator)
        return
    scale = 1 / math.sqrt(parameter.shape[-1])
    if name.endswith(_WRITES_TO_RESIDUAL):
        scale /= math.sqrt(2 * config.num_layers)
    elif name in ("embed.weight", "head.weight"):
        scale *= LOGIT_SCALE / config.logit_scale
    parameter.normal_(0.0, scale, generator=generator)
