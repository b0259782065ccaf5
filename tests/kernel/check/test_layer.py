"""The buffers of one layer: that they are this layer's, and that a wrong one shows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.kernel.check.against_model import random_prompts
from headrace.kernel.check.layer import LENGTHS, Left, left_by_last_layer, save
from headrace.model.checkpoint import load_model
from headrace.model.presets import PRESETS
from headrace.step.isa import Buffer
from headrace.step.oracle.world import north
from headrace.step.pack import PackedWeights, pack_checkpoint, pack_synthetic
from tests.kernel.check.fakes import Spoil, kernel, not_a_number, scaled

MICRO = Path(__file__).parents[3] / "models" / "north-micro"


def left(packed: PackedWeights, spoil: Spoil | None = None) -> dict[str, Left]:
    return {one.name: one for one in left_by_last_layer(packed, make=kernel(spoil=spoil), sms=3)}


def small() -> PackedWeights:
    return pack_synthetic(north(), seed=2, device="cpu", dtype=torch.bfloat16)


def test_a_right_kernel_leaves_what_the_oracle_leaves() -> None:
    found = left(small())
    assert list(found) == ["X", "QKV", "PARTIALS", "ATTENTION_OUT", "ROUTER_LOGITS", "HIDDEN", "LOGITS"]
    assert {one.error for one in found.values()} == {one.largest for one in found.values()} == {0.0}


@pytest.mark.parametrize("buffer", [Buffer.PARTIALS, Buffer.HIDDEN, Buffer.LOGITS])
def test_the_wrong_buffer_is_named(buffer: Buffer) -> None:
    found = left(small(), scaled(buffer, 1.02))
    assert [name for name, one in found.items() if one.error > 0] == [buffer.name]
    assert found[buffer.name].error == pytest.approx(0.02, rel=0.01)
    assert found[buffer.name].largest > 0
    assert math.isnan(left(small(), not_a_number(buffer))[buffer.name].error)


def test_they_are_the_chosen_layers_and_no_others() -> None:
    """X is what PyTorch has after this layer of the whole model: further from what it has after others."""
    found = left(pack_checkpoint(MICRO, device="cpu", dtype=torch.bfloat16, layers=3))
    model = load_model(MICRO, device="cpu", dtype=torch.float32, progress=None)
    seen: dict[int, Tensor] = {}

    def remember(layer: int) -> object:
        def hook(block: nn.Module, inputs: object, output: Tensor) -> None:
            seen[layer] = output[0, -1]

        return hook

    for layer in (1, 2, 3):
        model.blocks[layer].register_forward_hook(remember(layer))  # type: ignore[arg-type]
    for row, prompt in enumerate(random_prompts(model.config, LENGTHS)):
        model.full(torch.tensor([prompt]))
        x = found["X"].oracle[:, row].flatten()
        far = {layer: float((x - right).norm() / right.norm()) for layer, right in seen.items()}
        assert far[2] < 0.05, far
        assert min(far[1], far[3]) > 4 * far[2], far


def test_a_dense_layer_has_no_routing() -> None:
    shape = PRESETS["north-micro-shape"]
    packed = pack_synthetic(replace(shape, layers=shape.layers[:1]), device="cpu", dtype=torch.bfloat16)
    assert "ROUTER_LOGITS" not in left(packed)


def test_they_are_kept_by_name(tmp_path: Path) -> None:
    ones = torch.ones(2, 3)
    save([Left("X", ones, 2 * ones)], tmp_path / "left.npz")
    with np.load(tmp_path / "left.npz") as kept:
        assert sorted(kept) == ["X.kernel", "X.oracle"]
        assert (kept["X.oracle"] == 2).all()
