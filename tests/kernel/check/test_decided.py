"""Deep models whose routing is not in doubt show errors that others hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.kernel.check import decided
from headrace.kernel.check.against_model import logit_errors
from headrace.kernel.check.decided import OWN, SMALL, decide_routing, decided_bench
from headrace.kernel.check.kernels import MakeKernel
from headrace.model.config import DenseMLP, MoEMLP
from headrace.model.kv import KVCache
from headrace.model.presets import north_layers
from headrace.step.oracle.world import WINDOW, north
from headrace.step.pack import PackedWeights, pack_synthetic
from headrace.step.plan import Plan
from tests.kernel.check.fakes import OracleKernel, kernel

MOE = MoEMLP(width=32, experts=32, top_k=4)
DEEP = replace(north(), layers=north_layers(33, window=WINDOW, dense=DenseMLP(width=64), routed=MOE))

FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "experts in another order": ("blocks.20.mlp.experts.down", lambda values: values.roll(1, 0)),
    "tokens to other experts": ("blocks.20.mlp.router.weight", lambda values: values.roll(1, 0)),
    "a layer without attention": ("blocks.20.attention.o.weight", torch.zeros_like),
}


def errors(make: MakeKernel) -> tuple[float, float]:
    return logit_errors(decided_bench(DEEP, [30, 64, 80, 3], 4, device="cpu", make=make, sms=2))


def with_fault(name: str) -> MakeKernel:
    """Of an oracle that has other weights than PyTorch in one of 33 layers."""
    parameter, change = FAULTS[name]

    def make(plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> OracleKernel:
        other = PackedWeights(weights.config, device="cpu", dtype=torch.bfloat16)
        other.data.copy_(weights.data)
        other.norms.copy_(weights.norms)
        other.put(parameter, change(weights.get(parameter)))
        return OracleKernel(plan, other, cache)

    return make


def test_a_right_kernel_is_nearer_to_float32_than_pytorch() -> None:
    ours, theirs = errors(kernel())
    assert ours <= OWN * theirs
    assert theirs <= SMALL


@pytest.mark.parametrize("name", FAULTS)
def test_one_wrong_layer_is_seen(name: str) -> None:
    ours, theirs = errors(with_fault(name))
    assert ours > 1.5 * OWN * theirs
    assert theirs <= SMALL


def test_with_routers_as_they_are_drawn_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided, "decide_routing", lambda packed: None)
    ours, theirs = errors(with_fault("a layer without attention"))
    assert theirs > 2 * SMALL
    assert ours < 1.5 * theirs


def test_every_class_has_its_experts_in_every_layer() -> None:
    packed = pack_synthetic(DEEP, device="cpu", dtype=torch.bfloat16)
    decide_routing(packed)
    embedding = packed.get("embed.weight").float()
    groups = []
    for layer in (1, 2, 32):
        logits = embedding @ packed.get(f"blocks.{layer}.mlp.router.weight").float().t()
        chosen = [frozenset(row) for row in logits.topk(4).indices.tolist()]
        assert chosen[:8] == chosen[8:16]  # eight classes
        assert frozenset().union(*chosen[:8]) == frozenset(range(32))
        groups.append(tuple(chosen[:8]))
    assert len(set(groups)) == 3
