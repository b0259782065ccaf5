"""From files to pages, a tensor at a time."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.model.checkpoint import CheckpointError, load_model
from headrace.model.names import HEAD, hugging_face_names
from headrace.model.synthetic import synthetic_model
from headrace.model.transformer import Model
from headrace.step.errors import PlanError
from headrace.step.pack import PackedWeights, pack_checkpoint, pack_model, pack_synthetic, stream
from tests.step.configs import TINY

CONFIG = {
    "model_type": "cohere2_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 96,
    "prefix_dense_sliding_window_pattern": 1,
    "layer_types": ["sliding_attention" if layer % 4 else "full_attention" for layer in range(5)],
    "sliding_window": 128,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-6,
    "logit_scale": 1.0,
    "max_position_embeddings": 1024,
}


def stored_tensors(model: Model, fused: bool = False) -> dict[str, Tensor]:
    """What a checkpoint of the model holds, experts one by one or together."""
    stored = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(1, 5)] if fused else []
    parameters = dict(model.named_parameters())
    return {
        tensor.name: parameters[tensor.parameter].detach()[tensor.region or ...].contiguous()
        for tensor in hugging_face_names(model.config, stored)
    }


def save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] = CONFIG) -> Path:
    """A checkpoint of three files."""
    names = sorted(tensors)
    parts = [names[part::3] for part in range(3)]
    for part, some in enumerate(parts):
        save_file({name: tensors[name] for name in some}, folder / f"model-{part + 1}-of-3.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
def test_a_checkpoint_gives_the_pages_of_the_model(tmp_path: Path, fused: bool) -> None:
    folder = save(tmp_path, stored_tensors(synthetic_model(TINY, dtype=torch.bfloat16), fused))
    packed = pack_checkpoint(folder, device="cpu", dtype=torch.bfloat16)
    model = load_model(folder, device="cpu", dtype=torch.bfloat16)
    expected = pack_model(model, device="cpu", dtype=torch.bfloat16)
    assert packed.config == model.config
    assert torch.equal(packed.data, expected.data)
    assert torch.equal(packed.norms, expected.norms)


def test_the_first_layers_of_a_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, stored_tensors(synthetic_model(TINY, dtype=torch.bfloat16)))
    whole = pack_checkpoint(folder, device="cpu", dtype=torch.bfloat16)
    packed = pack_checkpoint(folder, device="cpu", dtype=torch.bfloat16, layers=2)
    assert packed.config == replace(whole.config, layers=whole.config.layers[:2])
    assert len(packed.parameters) < len(whole.parameters)
    for name in packed.parameters:
        assert torch.equal(packed.get(name), whole.get(name)), name


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    class Bar:
        done = total = 0
        finished = False

        def start(self, what: str, total: int) -> None:
            self.total = total

        def advance(self, amount: int) -> None:
            self.done += amount

        def finish(self) -> None:
            self.finished = True

    tensors = stored_tensors(synthetic_model(TINY, dtype=torch.bfloat16))
    bar = Bar()
    pack_checkpoint(save(tmp_path, tensors), device="cpu", dtype=torch.bfloat16, progress=bar)
    assert bar.finished
    assert bar.done == bar.total == sum(tensor.nbytes for tensor in tensors.values())


class Watched:
    """A source that sees whether anyone keeps a tensor once the next is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.given = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.kept = 0

    def location(self, name: str) -> str:
        return "memory"

    def size(self, name: str) -> int:
        return self.given[name].nbytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        alive: list[weakref.ref[Tensor]] = []
        for name in self.given:
            tensor = self.given[name].clone()
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            self.kept = max(self.kept, sum(reference() is not None for reference in alive))


def test_no_tensor_outlives_the_next() -> None:
    model = synthetic_model(TINY)
    source = Watched(stored_tensors(model))
    packed = PackedWeights(TINY, device="cpu", dtype=torch.float32)
    stream(packed, hugging_face_names(TINY), source, None)
    assert source.kept == 1  # the one just given; the caller still names it when it asks for the next
    assert torch.equal(packed.data, pack_model(model, device="cpu", dtype=torch.float32).data)


def test_a_head_that_is_no_copy_of_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    tensors = stored_tensors(synthetic_model(TINY))
    same = save(tmp_path, tensors | {HEAD: tensors["model.embed_tokens.weight"].clone()})
    pack_checkpoint(same, device="cpu", dtype=torch.float32)
    other = save(tmp_path, tensors | {HEAD: tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        pack_checkpoint(other, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synthetic_pages_are_those_of_the_synthetic_model(dtype: torch.dtype) -> None:
    made = pack_synthetic(TINY, seed=3, device="cpu", dtype=dtype)
    right = pack_model(synthetic_model(TINY, seed=3, dtype=dtype), device="cpu", dtype=dtype)
    assert torch.equal(made.data, right.data)
    assert torch.equal(made.norms, right.norms)
    assert not torch.equal(made.data, pack_synthetic(TINY, seed=4, device="cpu", dtype=dtype).data)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="hidden_size is 72: a plan needs a multiple of 32"):
        PackedWeights(replace(TINY, hidden_size=72), device="cpu", dtype=torch.float32)
