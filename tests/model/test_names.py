"""Names of weights against North Mini Code's published ones, written out here; no weights are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from headrace.model.checkpoint import check_tensors
from headrace.model.errors import CheckpointError
from headrace.model.names import hugging_face_names
from headrace.model.presets import NORTH_MINI_CODE

VOCABULARY, HIDDEN, LAYERS, EXPERTS = 262144, 2048, 49, 128
HEADS, KV_HEADS, HEAD = 32, 4, 128
DENSE, EXPERT = 3072, 768  # widths: of layer 0, and of one expert


def published() -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint. The head is the embedding and is not stored; layer 0 has no experts."""
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        tensors[f"{layer}.self_attn.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        tensors[f"{layer}.self_attn.k_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        tensors[f"{layer}.self_attn.v_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        tensors[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        if number == 0:
            tensors |= gated(f"{layer}.mlp", DENSE)
            continue
        tensors[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            tensors |= gated(f"{layer}.mlp.experts.{expert}", EXPERT)
    return tensors


def gated(where: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{where}.gate_proj.weight": (width, HIDDEN),
        f"{where}.up_proj.weight": (width, HIDDEN),
        f"{where}.down_proj.weight": (HIDDEN, width),
    }


class Index:
    """A checkpoint of which only names and shapes are there."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def location(self, name: str) -> str:
        return "model-00001-of-00002.safetensors"

    def size(self, name: str) -> int:
        raise AssertionError("nothing is to be read")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("nothing is to be read")


def check(shapes: dict[str, tuple[int, ...]]) -> None:
    check_tensors(Path("north"), hugging_face_names(NORTH_MINI_CODE, shapes), Index(shapes))


def test_the_list_has_the_published_number_of_parameters() -> None:
    """The model card says 30.48 B; transformers counts exactly this many for the published config."""
    assert sum(map(math.prod, published().values())) == 30_484_303_872


def test_norths_published_names_and_shapes_are_those_asked_for() -> None:
    check(published())
    wanted = hugging_face_names(NORTH_MINI_CODE, published())
    assert len(wanted) == len({tensor.name for tensor in wanted})
    assert {tensor.name: tensor.shape for tensor in wanted} == published()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.48.mlp.experts.127.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_name_too_few_or_too_many_is_told(name: str) -> None:
    shapes = published()
    shape = shapes.pop(name)
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}[.;]"):
        check(shapes)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.0\.mlp\.experts\.0"):
        check(published() | {"model.layers.0.mlp.experts.0.up_proj.weight": shape})
    with pytest.raises(CheckpointError, match=f"{name} in model-00001.* has shape"):
        check(published() | {name: (*shape, 1)})
