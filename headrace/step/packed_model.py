"""The PyTorch model over packed weights, for prompts: the pages are the only copy of the weights.

A layer's matrices are unpacked right before the layer runs, into scratch memory that all layers share. There
are two halves of it, taken in turn: on a GPU the next layer is unpacked on a stream of its own while the
present one computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.build import build_model
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights

_ALIGNMENT = 128  # elements between the beginnings of two matrices divide by it: what the products like best


def packed_model(weights: PackedWeights) -> Model:
    """A model that computes exactly what a plain one with the same weights does.

    One pass at a time, and all of them on one stream. Its parameters are views of scratch memory: they hold
    a layer's weights only while it runs.
    """
    model = build_model(weights.config, device="meta", dtype=weights.data.dtype)
    for name in weights.map.norms:
        _set(model, name, weights.get(name).to(weights.data.dtype))
    scratch = Scratch(weights, _matrices(model))
    model.embed = PackedRows(weights, scratch, "embed.weight")  # type: ignore[assignment]
    if model.head is not None:
        model.head = PackedRows(weights, scratch, "head.weight")  # type: ignore[assignment]
    for layer, block in enumerate(model.blocks):
        for name, view in scratch.views(layer).items():
            _set(model, name, view)
        block.register_forward_pre_hook(_unpacks(scratch, layer))
    return model


class Scratch:
    """Memory for the matrices of two layers, `layers[i]` naming the shapes of layer i's."""

    def __init__(self, weights: PackedWeights, layers: list[dict[str, torch.Size]]) -> None:
        self._weights, self._layers = weights, layers
        config = weights.config
        rows = config.vocab_size * config.hidden_size
        room = max(rows, *(sum(map(_room, shapes.values())) for shapes in layers))
        data = weights.data
        self._halves = [torch.empty(room, dtype=data.dtype, device=data.device) for _ in range(2)]
        self._holds: list[int | None] = [None, None]  # which layer, by half
        self._stream: torch.cuda.Stream | None = None
        if data.is_cuda:
            self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]

    def views(self, layer: int) -> dict[str, Tensor]:
        """Where the matrices of a layer are once it has been unpacked."""
        begin, views = 0, {}
        for name, shape in self._layers[layer].items():
            views[name] = self._halves[layer % 2][begin : begin + shape.numel()].view(shape)
            begin += _room(shape)
        return views

    def enter(self, layer: int) -> None:
        """Have a layer's matrices there for what the current stream does next, and begin with the next's."""
        if self._stream is None:
            self._unpack(layer)
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        if self._holds[layer % 2] != layer:
            self._unpack(layer)
        if layer + 1 < len(self._layers) and self._holds[(layer + 1) % 2] != layer + 1:
            # The last reader of the other half, the layer before this one, is on the current stream.
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._unpack(layer + 1)

    def rows(self, parameter: str) -> Tensor:
        """An embedding or head [vocabulary, hidden], there until the next layer or head is unpacked."""
        config = self._weights.config
        shape = (config.vocab_size, config.hidden_size)
        out = self._halves[0][: math.prod(shape)].view(shape)
        self._holds[0] = None
        self._weights.unpack(parameter, out)
        return out

    def _unpack(self, layer: int) -> None:
        for name, view in self.views(layer).items():
            self._weights.unpack(name, view)
        self._holds[layer % 2] = layer


class PackedRows(nn.Module):
    """An embedding, or the matrix of a head, whose rows stay packed until they are wanted."""

    def __init__(self, weights: PackedWeights, scratch: Scratch, parameter: str) -> None:
        super().__init__()
        self._weights, self._scratch, self._parameter = weights, scratch, parameter

    @property
    def weight(self) -> Tensor:
        """All rows, [vocabulary, hidden], in scratch memory."""
        return self._scratch.rows(self._parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids` [tokens], [tokens, hidden]."""
        return self._weights.rows(self._parameter, ids)


def _unpacks(scratch: Scratch, layer: int) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        scratch.enter(layer)

    return hook


def _matrices(model: Model) -> list[dict[str, torch.Size]]:
    """The shapes of each layer's parameters but its norms, by their names in the model."""
    return [
        {f"blocks.{layer}.{name}": parameter.shape for name, parameter in _without_norms(block).items()}
        for layer, block in enumerate(model.blocks)
    ]


def _without_norms(block: nn.Module) -> Mapping[str, Tensor]:
    return {name: parameter for name, parameter in block.named_parameters() if parameter.dim() > 1}


def _room(shape: torch.Size) -> int:
    return -(-shape.numel() // _ALIGNMENT) * _ALIGNMENT


def _set(model: Model, name: str, values: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(values, requires_grad=False))
