"""Masks, and sampling under them."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.model.constraint import forbidden, mask_of, mask_words
from headrace.model.sampler import SampleRow, sample
from headrace.model.sampling import SamplingParams

VOCABULARY = 100  # no multiple of 32
ALLOWED = {0, 31, 32, 63, 99}


def test_a_mask_says_what_it_was_made_of() -> None:
    mask = mask_of(ALLOWED, VOCABULARY)
    assert mask.shape == (mask_words(VOCABULARY),) == (4,)
    assert mask[0] & 1
    assert (mask[1] >> 0) & 1
    banned = forbidden(mask, VOCABULARY)
    assert banned.shape == (VOCABULARY,)
    assert set(banned.logical_not().nonzero().flatten().tolist()) == ALLOWED


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=5, top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.01),
        SamplingParams(logit_bias={7: 100.0}),
    ],
)
def test_nothing_else_is_drawn(params: SamplingParams) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[0, 50] = 20.0  # what would be drawn without the mask
    mask = mask_of(ALLOWED, VOCABULARY)

    def draw(position: int, masked: bool) -> int:
        row = SampleRow(params, 1, position, (), (), mask if masked else None)
        return sample(logits, [row])[0].token

    drawn = {draw(position, True) for position in range(200)}
    assert drawn <= ALLOWED
    assert params.is_greedy or len(drawn) > 1
    assert draw(0, False) not in ALLOWED


def test_a_masked_row_changes_no_other_and_log_probabilities_stay_the_models_own() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    params = SamplingParams(temperature=0, logprobs=1)
    free = SampleRow(params, 1, 0, (), ())
    bound = SampleRow(params, 1, 0, (), (), mask_of({3}, VOCABULARY))
    alone, (first, second) = sample(logits[:1], [free]), sample(logits, [free, bound])
    assert torch.equal(logits, before)
    assert first == alone[0]
    assert second.token == 3
    assert second.logprobs is not None
    expected = float(logits[1].double().log_softmax(0)[3])
    assert math.isclose(second.logprobs.logprob, expected, abs_tol=1e-9)
