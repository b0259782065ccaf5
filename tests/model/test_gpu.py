"""The same models on a GPU, where attention and experts take other kernels than on a CPU."""

from __future__ import annotations

import pytest
import torch

from headrace.model.layers import MoE, route
from headrace.model.synthetic import synthetic_model
from tests.model.reference import Paged

pytestmark = pytest.mark.gpu
LENGTH = 900  # crosses north-micro-shape's window of 256 several times


@pytest.mark.parametrize("name", ["north-micro-shape", "smollm2-135m"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_any_chunking_equals_one_pass(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The typical token's root mean square difference, relative to the logits' own size.

    The median, as in bfloat16 a few tokens take another expert where two are nearly equal, and differ much.
    """
    model = synthetic_model(name, device="cuda", dtype=dtype)
    tokens = torch.randint(0, 4096, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = model.full(torch.tensor([tokens], device="cuda"))[0]
    for parts in ([LENGTH], [300, 1, 1, 200, 398], [64, 800, 36], [100] * 9):
        got = Paged(model).sequence(tokens, parts)
        differences = (got - expected).square().mean(dim=-1).sqrt()
        assert differences.median() < tolerance * expected.std(), parts


def test_grouped_experts_are_taken_and_equal_the_loop() -> None:
    model = synthetic_model("north-micro-shape", device="cuda", dtype=torch.bfloat16)
    moe = next(module for module in model.modules() if isinstance(module, MoE))
    h = torch.randn(70, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    ids, weights = route(moe.router_logits(h), moe.mlp)
    taken = moe.experts(h, ids, weights)
    assert torch.equal(taken, moe.experts.grouped(h, ids, weights))
    loop = moe.experts.one_by_one(h, ids, weights)
    assert (taken - loop).abs().max() < 0.02 * loop.abs().max()


def test_logits_are_not_rounded() -> None:
    """Half-precision weights, but sums in float32: more distinct values than 8 bits could hold."""
    model = synthetic_model("smollm2-135m", device="cuda", dtype=torch.bfloat16)
    logits = model.logits(torch.randn(1, 576, device="cuda", dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
