"""The PyTorch model over pages computes what the plain one does, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from headrace.model.config import ModelConfig
from headrace.model.presets import LLAMA_3_2_1B, PRESETS
from headrace.model.synthetic import synthetic_model
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.packed_model import Scratch, _matrices, packed_model, scratch_bytes, spaced
from tests.model.reference import Paged
from tests.step.configs import TINY, configs


def packed_of(model: Model) -> PackedWeights:
    return pack_model(model, device="cpu", dtype=model.dtype)


def tokens_for(config: ModelConfig, count: int) -> list[int]:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@settings(max_examples=25)
@given(configs())
def test_every_matrix_comes_out_as_it_went_in(config: ModelConfig) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = synthetic_model(config, dtype=dtype)
        packed = packed_of(model)
        for name, values in model.named_parameters():
            if values.dim() > 1:
                out = torch.full_like(values, torch.nan)
                packed.unpack(name, out)
                assert torch.equal(out, values), name


@settings(max_examples=15)
@given(configs())
def test_logits_are_equal(config: ModelConfig) -> None:
    for dtype, kept in ((torch.bfloat16, 0), (torch.float32, 0), (torch.bfloat16, 1), (torch.bfloat16, 2)):
        model = synthetic_model(config, dtype=dtype)
        tokens = torch.tensor([tokens_for(config, 20)] * 2)
        own = packed_model(packed_of(model), kept=kept)
        for _ in range(2):  # scratch memory holds the last layers of the pass before
            assert torch.equal(own.full(tokens), model.full(tokens))


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied_head=False)], ids=["tied", "untied"])
def test_passes_over_the_cache_are_equal(config: ModelConfig) -> None:
    model = synthetic_model(config, dtype=torch.bfloat16)
    own = packed_model(packed_of(model))
    tokens, parts = tokens_for(config, 200), [130, 1, 1, 68]
    assert torch.equal(Paged(own).sequence(tokens, parts), Paged(model).sequence(tokens, parts))


def test_what_a_model_takes_beside_the_pages_is_two_layers() -> None:
    """All layers' parameters lie in the same two pieces of memory, of the largest layer's size."""
    model = packed_model(packed_of(synthetic_model(TINY)))
    places = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for block in model.blocks
        for parameter in block.parameters()
        if parameter.dim() > 1
    }
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks)
    assert len(places) == 2
    assert all(size < 1.1 * 4 * largest for size in places.values())


@pytest.mark.parametrize("config", [TINY, replace(TINY, vocab_size=5000)], ids=["layers", "vocabulary"])
@pytest.mark.parametrize("kept", [0, 1, 2, TINY.num_layers])
def test_what_a_model_takes_beside_the_pages_is_known_before_it_is_made(
    config: ModelConfig, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, taken, empty = packed_of(synthetic_model(config, dtype=torch.bfloat16)), [], torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", noted)
    Scratch(weights, _matrices(synthetic_model(config)), kept)
    pieces = taken[-2 - kept :]
    assert sum(pieces) == scratch_bytes(config, kept, torch.bfloat16)


@pytest.mark.parametrize("kept", [0, 1, 2, TINY.num_layers])
def test_kept_layers_are_unpacked_once(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []
    unpack = Scratch._unpack

    def noted(scratch: Scratch, layer: int) -> None:
        unpacked.append(layer)
        unpack(scratch, layer)

    monkeypatch.setattr(Scratch, "_unpack", noted)
    model = synthetic_model(TINY)
    own, tokens = packed_model(packed_of(model), kept=kept), torch.tensor([tokens_for(TINY, 20)])
    for _ in range(3):
        assert torch.equal(own.full(tokens), model.full(tokens))
    layers = spaced(TINY.num_layers, kept)
    assert len(layers) == kept
    assert all(unpacked.count(layer) == 1 for layer in layers)
    others = [unpacked.count(layer) for layer in range(TINY.num_layers) if layer not in layers]
    assert not others or max(others) == 3  # a layer may outlast a pass where its half has no other


def test_kept_layers_are_evenly_apart() -> None:
    assert spaced(49, 0) == []
    assert spaced(49, 49) == list(range(49))
    assert spaced(6, 2) == [2, 5]
    for count in range(2, 49):
        apart = [b - a for a, b in pairwise(spaced(49, count))]
        assert len(apart) == count - 1
        assert max(apart) - min(apart) <= 1


def test_a_layer_that_is_not_unpacked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = synthetic_model(TINY)
    own, tokens = packed_model(packed_of(model)), torch.tensor([tokens_for(TINY, 20)])
    unpack = Scratch._unpack
    monkeypatch.setattr(Scratch, "_unpack", lambda self, layer: layer == 3 or unpack(self, layer))
    assert not torch.equal(own.full(tokens), model.full(tokens))


def test_matrices_are_all_parameters_of_a_layer_but_its_norms() -> None:
    shape = replace(LLAMA_3_2_1B, layers=LLAMA_3_2_1B.layers[:1])
    model = synthetic_model(replace(shape, vocab_size=64))
    (names,) = _matrices(model)
    assert {name.removeprefix("blocks.0.") for name in names} == {
        *(f"attention.{part}.weight" for part in "qkvo"),
        *(f"mlp.{part}.weight" for part in ("gate", "up", "down")),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [0, 3, 7])
def test_on_a_gpu_the_next_layer_is_unpacked_while_one_computes(kept: int) -> None:
    """North's widths, so that both take their time; and passes that follow at once."""
    north = PRESETS["north-mini-code"]
    model = synthetic_model(replace(north, layers=north.layers[:7]), device="cuda", dtype=torch.bfloat16)
    own = packed_model(pack_model(model, device="cuda", dtype=torch.bfloat16), kept=kept)
    tokens = tokens_for(north, 2500)
    expected = Paged(model, blocks=48).sequence(tokens, [2048, 452])
    for _ in range(5):
        assert torch.equal(Paged(own, blocks=48).sequence(tokens, [2048, 452]), expected)
