"""Synthetic weights of any shape, and what shapes need in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.model.build import build_model
from headrace.model.config import ConfigError, KVGroup
from headrace.model.kv import KVCache
from headrace.model.memory import (
    active_parameter_count,
    kv_bytes,
    kv_bytes_per_token,
    parameter_count,
    weight_bytes,
)
from headrace.model.names import hugging_face_names
from headrace.model.presets import LLAMA_3_2_1B, NORTH_MICRO_SHAPE, NORTH_MINI_CODE, PRESETS, SMOLLM2_135M
from headrace.model.synthetic import synthetic_model


def test_north_mini_code_has_the_published_size() -> None:
    """The model card says 30.48 B parameters; transformers counts exactly as many for its config."""
    assert parameter_count(NORTH_MINI_CODE) == 30_484_303_872
    assert weight_bytes(NORTH_MINI_CODE, torch.bfloat16) == 2 * 30_484_303_872
    assert active_parameter_count(NORTH_MINI_CODE) == 3_305_213_952
    assert len(NORTH_MINI_CODE.layers_in(KVGroup.FULL)) == 13
    assert NORTH_MINI_CODE.layers_in(KVGroup.FULL)[:3] == (0, 4, 8)


def test_llamas_have_the_published_sizes() -> None:
    assert parameter_count(LLAMA_3_2_1B) == 1_235_814_400
    assert parameter_count(SMOLLM2_135M) == 134_515_008


def test_a_head_of_its_own_counts_and_an_untied_embedding_is_not_read() -> None:
    untied = replace(SMOLLM2_135M, tied_head=False)
    assert parameter_count(untied) - parameter_count(SMOLLM2_135M) == 49152 * 576
    assert active_parameter_count(untied) == active_parameter_count(SMOLLM2_135M)


def test_kv_of_north() -> None:
    """13 full layers and 36 sliding ones, 4 heads of 128, K and V, 2 bytes."""
    assert kv_bytes_per_token(NORTH_MINI_CODE, KVGroup.FULL, torch.bfloat16) == 13 * 4 * 128 * 2 * 2
    assert kv_bytes_per_token(SMOLLM2_135M, KVGroup.SLIDING, torch.bfloat16) == 0
    sliding_block = 36 * 4 * 128 * 2 * 2 * 64
    full_block = 13 * 4 * 128 * 2 * 2 * 64
    assert kv_bytes(NORTH_MINI_CODE, 64, torch.bfloat16) == sliding_block + full_block
    # A window of 4096 tokens touches 65 blocks when it begins inside one.
    assert kv_bytes(NORTH_MINI_CODE, 65536, torch.bfloat16) == 65 * sliding_block + 1024 * full_block


def test_memory_is_what_gets_allocated() -> None:
    model = synthetic_model(NORTH_MICRO_SHAPE, dtype=torch.bfloat16)
    allocated = sum(parameter.nbytes for parameter in model.parameters())
    assert allocated == weight_bytes(NORTH_MICRO_SHAPE, torch.bfloat16)
    cache = KVCache(NORTH_MICRO_SHAPE, {KVGroup.FULL: 2, KVGroup.SLIDING: 2}, dtype=torch.bfloat16)
    assert sum(pages.nbytes for pages in cache.pages) == kv_bytes(NORTH_MICRO_SHAPE, 128, torch.bfloat16)


@pytest.mark.parametrize("name", PRESETS)
def test_names_cover_every_parameter_exactly(name: str) -> None:
    """By element counts: a name too few or too many, or a region twice, would show."""
    model = build_model(PRESETS[name], device="meta", dtype=torch.bfloat16)
    named: dict[str, int] = {}
    for tensor in hugging_face_names(PRESETS[name]):
        size = torch.Size(tensor.shape).numel()
        named[tensor.parameter] = named.get(tensor.parameter, 0) + size
    assert named == {key: parameter.numel() for key, parameter in model.named_parameters()}


def test_activations_stay_sane_over_norths_depth() -> None:
    """49 layers of North's pattern, narrower: logits are finite and of the size that was asked for."""
    narrow = replace(NORTH_MICRO_SHAPE, hidden_size=128)
    layers = (*narrow.layers, *narrow.layers[1:] * 5)
    assert len(layers) == 49
    model = synthetic_model(replace(narrow, layers=layers), dtype=torch.bfloat16)
    logits = model.full(torch.randint(0, 4096, (1, 20)))
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 8


def test_seeds() -> None:
    shape = replace(NORTH_MICRO_SHAPE, layers=NORTH_MICRO_SHAPE.layers[:2])
    one, same, other = (
        torch.cat([parameter.flatten() for parameter in synthetic_model(shape, seed=seed).parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert (one != other).float().mean() > 0.99


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="north-mini-code, north-micro-shape"):
        synthetic_model("north-maxi")
