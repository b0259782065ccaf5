"""Random weights whose routing is never in doubt, so that errors of deep models can be told from roundings.

Among 128 random experts the eighth and the ninth are so close that roundings change the choice in every tenth
layer, another expert's answer changes the next choices, and after 49 layers logits in bfloat16 have nothing
left in common with float32's: whatever a kernel does is no worse than that. Here a token's class decides, and
it stands where no layer writes: for each class and layer there is a group of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernel.check.against_model import ModelBench, random_prompts
from headrace.kernel.check.kernels import MakeKernel, on_gpu
from headrace.model.config import ModelConfig, MoEMLP
from headrace.step.pack import PackedWeights, pack_synthetic
from headrace.step.packed_model import packed_model

# The kernel's error in PyTorch's own, which rounds the residual stream in every layer; the kernel does not.
OWN = 1.0
SMALL = 0.1  # PyTorch's own error is to be less: where it is not, its comparison with another says nothing

CODE = 4.0  # of a token's class, in its own column of the embedding; the residual stream ends at about 1
CERTAINTY = 1.0  # what the router makes of it, for the experts of the class
SPREAD = 0.4  # standard deviation of the rest of a router's logits


def decided_bench(
    config: ModelConfig,
    lengths: Sequence[int],
    rows: int,
    *,
    device: torch.device | str = "cuda",
    make: MakeKernel = on_gpu,
    sms: int = 132,
) -> ModelBench:
    """A model with such weights, which are there once: PyTorch reads the kernel's pages."""
    packed = pack_synthetic(config, seed=1, device=device, dtype=torch.bfloat16)
    decide_routing(packed)
    prompts = random_prompts(config, lengths)
    return ModelBench(packed_model(packed), prompts, rows, packed=packed, make=make, sms=sms)


@torch.no_grad()
def decide_routing(packed: PackedWeights, seed: int = 0) -> None:
    """Change the embedding, the routers, and all that writes to the residual stream.

    As many classes as there are groups of `top_k` experts; token t is of class t modulo that.
    """
    generator = torch.Generator().manual_seed(seed)
    [moe] = {layer.mlp for layer in packed.config.layers if isinstance(layer.mlp, MoEMLP)}
    classes = moe.experts // moe.top_k
    for name in packed.parameters:
        if name == "embed.weight":
            packed.put(name, _with_classes(packed.get(name), classes))
        elif name.endswith("router.weight"):
            groups = torch.randperm(classes, generator=generator).repeat_interleave(moe.top_k)
            packed.put(name, _by_class(packed.get(name), groups))
        elif name.endswith(("attention.o.weight", "down.weight", "experts.down")):
            written = packed.get(name)
            written[..., :classes, :] = 0
            packed.put(name, written)


def _with_classes(embedding: Tensor, classes: int) -> Tensor:
    tokens = torch.arange(len(embedding), device=embedding.device)
    embedding[:, :classes] = 0
    embedding[tokens, tokens % classes] = CODE
    return embedding


def _by_class(router: Tensor, groups: Tensor) -> Tensor:
    """`groups` says of which class the experts are."""
    classes = int(groups.max()) + 1
    router *= SPREAD
    router[:, :classes] = 0
    router[torch.arange(len(groups)), groups] = CERTAINTY
    return router
