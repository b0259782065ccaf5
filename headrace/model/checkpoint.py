"""From files to a model: a Hugging Face folder of safetensors, or a GGUF file.

Names and shapes are checked against the headers before memory is spent. Then the model is allocated on its
device, and the tensors stream into it one by one: the host never holds more than one file's mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headrace.model.build import build_model
from headrace.model.config import ModelConfig
from headrace.model.errors import CheckpointError
from headrace.model.gguf import GGUFFile
from headrace.model.hf_config import read_hugging_face_config
from headrace.model.names import HEAD, StoredTensor, gguf_names, hugging_face_names
from headrace.model.progress import Progress, tracked
from headrace.model.shards import SafetensorsFolder
from headrace.model.transformer import Model

__all__ = ["CheckpointError", "load_model", "read_config"]


class TensorSource(Protocol):
    """Tensors that can be looked at before they are read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def location(self, name: str) -> str: ...

    def size(self, name: str) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...


def read_config(path: Path) -> ModelConfig:
    """The config of a checkpoint: a Hugging Face folder or a .gguf file. Raises CheckpointError."""
    return read_hugging_face_config(path) if path.is_dir() else _open_gguf(path).config()


def load_model(
    path: Path, *, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> Model:
    """The model of a checkpoint, on `device`, its weights rounded to `dtype`.

    Raises CheckpointError for a checkpoint that is damaged, incomplete, or of a model that is not supported.
    """
    config, wanted, source = open_checkpoint(path)
    model = build_model(config, device=device, dtype=dtype)
    fill(model, wanted, source, progress)
    return model


def open_checkpoint(path: Path) -> tuple[ModelConfig, list[StoredTensor], TensorSource]:
    """A checkpoint, its names and shapes checked: config, places of its tensors, and the tensors.

    Raises CheckpointError.
    """
    source: TensorSource
    if path.is_dir():
        config = read_hugging_face_config(path)
        source = SafetensorsFolder(path)
        wanted = hugging_face_names(config, source.shapes.keys())
    else:
        source = _open_gguf(path)
        config = source.config()
        wanted = gguf_names(config)
    check_tensors(path, wanted, source)
    return config, wanted, source


def _open_gguf(path: Path) -> GGUFFile:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: give a Hugging Face folder or a .gguf file")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file: give one of these")
    return GGUFFile(path)


def check_tensors(path: Path, wanted: Sequence[StoredTensor], source: TensorSource) -> None:
    """Raise CheckpointError, naming every tensor at fault, unless the source has exactly what is wanted."""
    shapes = source.shapes
    names = {tensor.name for tensor in wanted}
    problems = []
    if missing := sorted(names - shapes.keys()):
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unexpected := sorted(name for name in shapes.keys() - names if not _redundant(name)):
        problems.append(f"unexpected tensors: {', '.join(unexpected)}")
    problems += [
        f"{tensor.name} in {source.location(tensor.name)} has shape {list(shapes[tensor.name])}, "
        f"but the config asks for {list(tensor.shape)}"
        for tensor in wanted
        if tensor.name in shapes and shapes[tensor.name] != tensor.shape
    ]
    if problems:
        raise CheckpointError(
            f"{path} does not fit its config: {'; '.join(problems)}. "
            "Weights and config must come from the same checkpoint, and all files must be there."
        )


def _redundant(name: str) -> bool:
    # Old checkpoints hold the rotary frequencies; some with a tied head hold that, too: see `fill`.
    return name == HEAD or name.endswith(".rotary_emb.inv_freq")


@torch.no_grad()
def fill(
    model: Model, wanted: Sequence[StoredTensor], source: TensorSource, progress: Progress | None
) -> None:
    """Copy every wanted tensor to its place.

    Raises CheckpointError if a head that the config ties to the embedding is stored and differs from it.
    """
    places = {tensor.name: tensor for tensor in wanted}
    parameters = dict(model.named_parameters())
    total = sum(source.size(name) for name in places)
    embedding_rows: Tensor | None = None
    with tracked(progress, "Loading weights", total) as advance:
        for name, tensor in source.tensors():
            if (place := places.get(name)) is not None:
                if place.paired_heads:
                    tensor = unpair(tensor, place.paired_heads)
                parameters[place.parameter][place.region or ...].copy_(tensor)
                advance(source.size(name))
            elif name == HEAD:
                embedding_rows = tensor.to(model.device, model.dtype, copy=True)
    if embedding_rows is not None and not torch.equal(embedding_rows, model.embed.weight):
        raise CheckpointError(
            f"{source.location(HEAD)}: {HEAD} differs from the embedding, but the config ties them: "
            "set tie_word_embeddings to false in config.json if the head is meant"
        )


def unpair(rows: Tensor, heads: int) -> Tensor:
    """Bring the rows [heads * head_dim, n] of a projection from neighbouring pairs to half-split ones."""
    pairs = rows.view(heads, -1, 2, rows.shape[-1])
    return pairs.transpose(1, 2).reshape(rows.shape)
