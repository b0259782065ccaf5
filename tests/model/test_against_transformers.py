"""Our models say what transformers' models say, and a model that is wrong in a known way does not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace.model.checkpoint import load_model
from tests.model.conftest import MakeReference
from tests.model.reference import (
    LLAMA3_ROPE,
    Paged,
    assert_same_logits,
    cuts,
    random_cohere,
    random_llama,
)

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("cohere2_moe", {}),
    *(("cohere2_moe", random_cohere(seed)) for seed in range(6)),
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    *(("llama", random_llama(seed)) for seed in range(3)),
]
NAMES = [f"{family}-{index}" for index, (family, _) in enumerate(MODELS)]


@pytest.mark.parametrize(("family", "fields"), MODELS, ids=NAMES)
def test_logits_and_greedy_tokens(family: str, fields: dict[str, Any], reference: MakeReference) -> None:
    theirs = reference(family, **fields)
    model = load_model(theirs.folder, device="cpu", dtype=torch.float32)
    assert theirs.logits.std() > 0.3  # or the tolerance would mean nothing
    prompt = theirs.tokens[0].tolist()

    assert_same_logits(model.full(theirs.tokens), theirs.logits)
    parts = cuts(len(prompt), random.Random(1))
    assert_same_logits(Paged(model).sequence(prompt, parts), theirs.logits[0])
    assert Paged(model).greedy(prompt, 64) == theirs.greedy(64)


def test_options_are_covered() -> None:
    """Random configs are only worth something if every value of every option occurs."""
    drawn = [random_cohere(seed) for seed in range(6)]
    for field, values in {
        "sliding_window": {1, 8, 63, 64, 65, 128},
        "norm_topk_prob": {True, False},
        "rms_norm_eps": {1e-6, None},
        "num_shared_experts": {0, 1, 2},
        "shared_expert_combination_strategy": {"average", "sum"},
        "first_k_dense_replace": {0, 1, 2},
        "prefix_dense_sliding_window_pattern": {1, 2},
        "tie_word_embeddings": {True, False},
    }.items():
        assert {fields[field] for fields in drawn} == values, field
