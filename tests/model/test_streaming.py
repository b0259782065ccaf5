"""Loading streams: beside the model itself, the host holds about one file of the checkpoint."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.model.checkpoint import load_model
from headrace.model.config import DenseMLP
from headrace.model.export import stored_tensors
from headrace.model.memory import weight_bytes
from headrace.model.presets import SMOLLM2_135M
from headrace.model.shards import SafetensorsFolder
from headrace.model.synthetic import synthetic_model

SHARDS = 6
CONFIG = replace(
    SMOLLM2_135M,
    vocab_size=1024,
    tied_head=False,
    layers=(replace(SMOLLM2_135M.layers[0], mlp=DenseMLP(width=512)),) * SHARDS,
    eos_token_ids=(),
)


class Ledger:
    """Counts the bytes of loaded tensors that are still alive, and the files that are open."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = self.most_bytes = self.files = self.most_files = 0
        self.tensors = SafetensorsFolder.tensors
        patch.setattr("headrace.model.shards.safe_open", self.counted_open)
        patch.setattr(SafetensorsFolder, "tensors", lambda source: self.counted_tensors(source))

    @contextmanager
    def counted_open(self, *args: Any, **options: Any) -> Iterator[Any]:
        self.files += 1
        self.most_files = max(self.files, self.most_files)
        with safe_open(*args, **options) as opened:
            yield opened
        self.files -= 1

    def counted_tensors(self, source: SafetensorsFolder) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors(source):
            self.bytes += tensor.nbytes
            self.most_bytes = max(self.bytes, self.most_bytes)
            weakref.finalize(tensor, self.release, tensor.nbytes)
            yield name, tensor
            del tensor

    def release(self, size: int) -> None:
        self.bytes -= size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one file for each layer."""
    path = tmp_path_factory.mktemp("sharded")
    tensors = stored_tensors(synthetic_model(CONFIG))
    for shard in range(SHARDS):
        mine = {
            name: tensor
            for name, tensor in tensors.items()
            if f".{shard}." in name or (shard == 0 and "layers" not in name)
        }
        save_file(mine, path / f"model-{shard}.safetensors")
    fields = {
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": 512,
        "num_hidden_layers": SHARDS,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "max_position_embeddings": CONFIG.max_positions,
        "rope_theta": CONFIG.rope_theta,
        "rms_norm_eps": CONFIG.norm_eps,
    }
    (path / "config.json").write_text(json.dumps(fields))
    return path


def largest_file(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_one_file_and_few_tensors_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch)
    load_model(folder, device="cpu", dtype=torch.float32)
    assert ledger.most_files == 1
    assert 0 < ledger.most_bytes < largest_file(folder)
    assert ledger.bytes == 0


def test_a_loader_that_collects_everything_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch)
    streamed = SafetensorsFolder.tensors
    monkeypatch.setattr(SafetensorsFolder, "tensors", lambda source: iter(list(streamed(source))))
    load_model(folder, device="cpu", dtype=torch.float32)
    assert ledger.most_bytes == weight_bytes(CONFIG, torch.float32)


def test_what_is_exported_loads_again(folder: Path) -> None:
    model, made = load_model(folder, device="cpu", dtype=torch.float32), synthetic_model(CONFIG)
    assert model.config == CONFIG
    for (name, loaded), parameter in zip(model.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(loaded, parameter), name
