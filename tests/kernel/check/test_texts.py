"""The comparisons over long texts pass for a right kernel and fail for wrong ones (all of them oracles)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from headrace.kernel.check.against_model import ModelBench, random_prompts
from headrace.kernel.check.exact import float32_model
from headrace.kernel.check.kernels import MakeKernel, Rows, Tokens
from headrace.kernel.check.texts import Followed, follow, nats, perplexity_error
from headrace.model.kv import KVCache
from headrace.model.synthetic import synthetic_model
from headrace.step.isa import Buffer
from headrace.step.oracle.world import north
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.plan import Plan
from tests.kernel.check.fakes import OracleKernel, kernel, not_a_number, scaled

PROMPTS = random_prompts(north(), [20, 66, 40])
TEXTS = random_prompts(north(), [30, 30, 30])


def bench(make: MakeKernel, prompts: list[list[int]]) -> ModelBench:
    model = synthetic_model(north(), seed=2, dtype=torch.bfloat16)
    return ModelBench(model, prompts, 4, make=make, sms=2)


class Lapsing(OracleKernel):
    """Every tenth token of the first row is the one after the right one."""

    made = 0

    def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]:
        assert steps == 1  # what comes next depends on it
        for tokens in super().launch(rows, steps):
            self.made += 1
            first = tokens[0]
            assert first is not None
            lapse = self.made % 10 == 0
            yield [(first + lapse) % self.plan.sizes.vocabulary, *tokens[1:]]


class Short(OracleKernel):
    """Makes a step less than it should."""

    def launch(self, rows: Rows, steps: int) -> Iterator[Tokens]:
        yield from super().launch(rows, steps - 1)


def of(
    kind: type[OracleKernel], plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool
) -> OracleKernel:
    return kind(plan, weights, cache)


def test_a_right_kernel_is_followed() -> None:
    followed = follow(bench(kernel(), PROMPTS), launches=2, steps=12)
    assert followed.tokens == 3 * 24
    assert followed.margin <= 1
    assert followed.near_share < 1
    assert followed.partings <= followed.most_partings


def test_wrong_tokens_are_seen() -> None:
    followed = follow(bench(partial(of, Lapsing), PROMPTS), launches=20, steps=1)
    assert followed.margin > 1
    assert followed.partings >= 2
    every = follow(bench(kernel(shift=1), PROMPTS), launches=1, steps=8)
    assert every.margin > 1
    assert every.partings > every.most_partings


def test_a_step_that_is_missing_is_seen() -> None:
    with pytest.raises(ValueError, match="7 steps were made, not 8"):
        follow(bench(partial(of, Short), PROMPTS), launches=1, steps=8)


def test_sums_of_what_was_followed() -> None:
    total = Followed(100, 10, 0.2, 3, 2) + Followed(100, 20, 0.1, 0, 4)
    assert total == Followed(200, 30, 0.2, 3, 6)
    assert total.near_share == 0.15
    assert total.most_partings == 22


def perplexity(make: MakeKernel) -> float:
    return perplexity_error(*nats(bench(make, [text[:1] for text in TEXTS]), TEXTS))


def test_a_right_kernel_foretells_as_float32_does() -> None:
    ours, right = nats(bench(kernel(), [text[:1] for text in TEXTS]), TEXTS)
    assert right > 4  # random texts of 300 tokens
    assert perplexity_error(ours, right) < 0.005


def test_a_kernel_that_foretells_worse_is_seen() -> None:
    assert perplexity(kernel(spoil=scaled(Buffer.LOGITS, 1.05))) > 0.01
    assert math.isnan(perplexity(kernel(spoil=not_a_number(Buffer.LOGITS))))
    assert perplexity_error(2.001, 2.0) == pytest.approx(0.0010005, rel=1e-3)


def test_float32_from_half_precision_weights_is_float32() -> None:
    """From a model's own weights and from packed ones; and after a pass no layer is left."""
    model = synthetic_model(north(), seed=2, dtype=torch.bfloat16)
    wide = synthetic_model(north(), seed=2, dtype=torch.bfloat16).float()
    packed = pack_model(model, device="cpu", dtype=torch.bfloat16)
    tokens = torch.tensor(PROMPTS[1])[None]
    with torch.no_grad():
        for source in (model.get_parameter, packed.get):
            exact = float32_model(north(), source)
            for _ in range(2):
                assert torch.equal(exact.full(tokens), wide.full(tokens))
            assert {parameter.device.type for parameter in exact.blocks.parameters()} == {"meta"}
