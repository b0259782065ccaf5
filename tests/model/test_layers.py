"""The router's exact choice, the norms' rounding, and gradients through all of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.config import MoEMLP
from headrace.model.layers import Experts, LayerNorm, RMSNorm, route
from headrace.model.presets import NORTH_MICRO_SHAPE
from headrace.model.synthetic import synthetic_model


@settings(max_examples=60)
@given(rows=st.lists(st.lists(st.integers(-3, 3), min_size=40, max_size=40), min_size=1, max_size=4))
def test_ties_go_to_the_lowest_index(rows: list[list[int]]) -> None:
    ids, weights = route(torch.tensor(rows, dtype=torch.float32), MoEMLP(width=1, experts=40, top_k=7))
    for row, chosen, weight in zip(rows, ids.tolist(), weights, strict=True):
        expected = sorted(range(40), key=lambda index, row=row: (-row[index], index))[:7]  # type: ignore[misc]
        assert chosen == sorted(expected)
        assert torch.equal(weight, torch.tensor([row[index] for index in chosen]).float().sigmoid())


def test_normalised_weights_sum_to_one_even_if_the_sigmoids_underflow() -> None:
    mlp = MoEMLP(width=1, experts=4, top_k=2, normalize=True)
    _, weights = route(torch.tensor([[0.0, 3.0, -1.0, 2.0], [-300.0, -200.0, -300.0, -250.0]]), mlp)
    assert weights[0].sum().item() == pytest.approx(1.0)
    assert weights.isfinite().all()


def test_experts_equal_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    mlp = MoEMLP(width=6, experts=5, top_k=2)
    experts = Experts(8, mlp).requires_grad_(False)
    experts.gate_up.normal_()
    experts.down.normal_()
    h, logits = torch.randn(7, 8), torch.randn(7, 5)
    ids, weights = route(logits, mlp)
    expected = torch.zeros(7, 8)
    for token in range(7):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = experts.gate_up[expert][:6] @ h[token], experts.gate_up[expert][6:] @ h[token]
            expected[token] += weight * (experts.down[expert] @ (gate * gate.sigmoid() * up))
    assert torch.allclose(experts(h, ids, weights), expected, atol=1e-5)


def test_grouped_experts_equal_the_loop() -> None:
    """Tokens that all use one expert, and experts that nobody uses, included."""
    torch.manual_seed(0)
    mlp = MoEMLP(width=16, experts=6, top_k=3)
    experts = Experts(32, mlp).requires_grad_(False).bfloat16()
    experts.gate_up.normal_(std=0.2)
    experts.down.normal_(std=0.2)
    for tokens in (1, 40):
        h, logits = torch.randn(tokens, 32).bfloat16(), torch.randn(tokens, 6)
        logits[:, 2] += 10
        logits[:, 4] -= 10
        ids, weights = route(logits, mlp)
        expected = experts.one_by_one(h, ids, weights)
        assert torch.allclose(experts.grouped(h, ids, weights), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_round_once(kind: type[RMSNorm] | type[LayerNorm]) -> None:
    torch.manual_seed(0)
    norm = kind(64, 1e-6).requires_grad_(False).bfloat16()
    norm.weight.normal_(1.0, 0.3)
    x = torch.randn(20, 64).bfloat16()
    wide = kind(64, 1e-6).requires_grad_(False)
    wide.weight.copy_(norm.weight)
    assert torch.equal(norm(x), wide(x.float()).bfloat16())


def test_gradients_reach_every_parameter() -> None:
    model = synthetic_model(replace(NORTH_MICRO_SHAPE, layers=NORTH_MICRO_SHAPE.layers[:3])).requires_grad_()
    logits = model.full(torch.randint(0, 4096, (2, 300)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 4096, (600,)))
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
