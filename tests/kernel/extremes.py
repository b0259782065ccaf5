"""Contexts from 1 token to 262,144, lengths around every edge, and routings that no random router makes.

What they are run on, the kernel on a GPU or the one on the host, is for those to say who use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernel.check.against_oracle import Bench, buffer_errors
from headrace.model.config import ModelConfig, MoEMLP
from headrace.model.layers import MoE
from headrace.step.isa import Buffer
from headrace.step.oracle.world import WINDOW, World, north, weights_of

# A fed token and 0, 1, 16K - 1 .. and 262,143 tokens before it; North's window in one layer of three.
CONTEXTS = [1, 2, 16_384, 65_537, 200_000, 262_144]
WIDE_WINDOW = north(window=4096)

# The fed token at pages' edges, the window's beginning at the sequence's and at a page's, and chunks' edges.
EDGES = [1, 63, 64, 65, 66, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 128, 129, 130, 133, 134, 135, 199]

MANY = MoEMLP(width=32, experts=128, top_k=8)
ROUTINGS: dict[str, tuple[MoEMLP, list[list[int]]]] = {
    "all rows on one expert": (MoEMLP(width=32, experts=5, top_k=1), [[3]] * 16),
    "all rows on the same eight": (MANY, [[0, 7, 8, 31, 64, 65, 126, 127]] * 16),
    "every expert, each by one row": (MANY, [list(range(8 * row, 8 * row + 8)) for row in range(16)]),
}


def routed(name: str) -> tuple[list[int], ModelConfig]:
    """Lengths of 16 sequences, and a config that only these tests have, so that its model may be changed."""
    moe, _ = ROUTINGS[name]
    return [20 + 9 * row for row in range(16)], replace(north(moe), norm_eps=2e-6)


def routing_errors(bench: Bench, name: str) -> dict[str, float]:
    """Of the buffers that a step leaves, once the model's routers send its rows where they are to go."""
    moe, chosen = ROUTINGS[name]
    force(bench.world, chosen)
    oracle, kernel = bench.oracle(), bench.kernel()
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    logits = torch.from_numpy(oracle.buffer(Buffer.ROUTER_LOGITS)).permute(1, 0, 2).flatten(1)
    assert [sorted(row) for row in logits[:, : moe.experts].topk(moe.top_k).indices.tolist()] == chosen
    return buffer_errors(bench, kernel, oracle)


@torch.no_grad()
def force(world: World, chosen: Sequence[Sequence[int]]) -> None:
    """Change the model's routers so that the world's rows go to these experts, in every layer."""
    for moe in (module for module in world.model.modules() if isinstance(module, MoE)):
        inputs = _inputs(world, moe)
        wanted = torch.full((len(inputs), moe.mlp.experts), -4.0)
        for row, experts in enumerate(chosen):
            wanted[row, list(experts)] = torch.linspace(2.0, 4.0, len(experts))
        moe.router.weight.copy_((torch.linalg.pinv(inputs) @ wanted).t())
    weights_of.cache_clear()  # they are kept by model


def _inputs(world: World, moe: MoE) -> Tensor:
    """What a layer's router gets from the world's rows, float32 [rows, hidden]."""
    seen: list[Tensor] = []
    handle = moe.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].float()))
    world.logits(world.rows())
    handle.remove()
    return seen[0].flatten(0, -2)
