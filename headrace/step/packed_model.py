"""The PyTorch model over packed weights, for prompts.

A layer's matrices are unpacked right before the layer runs, into scratch memory that the layers share. There
are two halves of it, taken in turn: on a GPU the next layer is unpacked on a stream of its own while the
present one computes. Some layers, or all, may keep their matrices unpacked where there is memory for it: a
prompt of 8192 tokens at North's sizes spends about a fifth of its time on the unpacking.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.build import build_model
from headrace.model.config import ModelConfig
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights

_ALIGNMENT = 128  # elements between the beginnings of two matrices divide by it: what the products like best


def packed_model(weights: PackedWeights, *, kept: int = 0) -> Model:
    """A model that computes exactly what a plain one with the same weights does.

    One pass at a time, and all of them on one stream. Its parameters are views of scratch memory: they hold
    a layer's weights only while it runs. But `kept` layers have memory of their own, and are unpacked once.
    """
    model = build_model(weights.config, device="meta", dtype=weights.data.dtype)
    for name in weights.map.norms:
        _set(model, name, weights.get(name).to(weights.data.dtype))
    scratch = Scratch(weights, _matrices(model), kept)
    model.embed = PackedRows(weights, scratch, "embed.weight")  # type: ignore[assignment]
    if model.head is not None:
        model.head = PackedRows(weights, scratch, "head.weight")  # type: ignore[assignment]
    for layer, block in enumerate(model.blocks):
        for name, view in scratch.views(layer).items():
            _set(model, name, view)
        block.register_forward_pre_hook(_unpacks(scratch, layer))
    return model


def scratch_bytes(config: ModelConfig, kept: int, dtype: torch.dtype) -> int:
    """Bytes that `packed_model` takes beside the pages."""
    return sum(_sizes(config, _rooms(config), spaced(config.num_layers, kept))) * dtype.itemsize


class Scratch:
    """Memory for the matrices of two layers, `layers[i]` naming the shapes of layer i's, and of `kept` more.

    The first two pieces are taken in turn by the layers that are not kept.
    """

    def __init__(self, weights: PackedWeights, layers: list[dict[str, torch.Size]], kept: int = 0) -> None:
        self._weights, self._layers = weights, layers
        own = spaced(len(layers), kept)
        self._turns = [layer for layer in range(len(layers)) if layer not in own]
        self._pieces = {layer: turn % 2 for turn, layer in enumerate(self._turns)}
        self._pieces.update({layer: 2 + index for index, layer in enumerate(own)})
        rooms = [sum(map(_room, shapes.values())) for shapes in layers]
        data, sizes = weights.data, _sizes(weights.config, rooms, own)
        self._memory = [torch.empty(size, dtype=data.dtype, device=data.device) for size in sizes]
        self._holds: list[int | None] = [None] * len(sizes)  # which layer
        self._ready: list[torch.cuda.Event | None] = [None, None]  # of the halves: when it does
        self._stream: torch.cuda.Stream | None = None
        if data.is_cuda:
            self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]

    def views(self, layer: int) -> dict[str, Tensor]:
        """Where the matrices of a layer are once it has been unpacked."""
        begin, views = 0, {}
        for name, shape in self._layers[layer].items():
            piece = self._memory[self._pieces[layer]]
            views[name] = piece[begin : begin + shape.numel()].view(shape)
            begin += _room(shape)
        return views

    def enter(self, layer: int) -> None:
        """Have a layer's matrices there for what the current stream does next, and begin with the next's."""
        piece = self._pieces[layer]
        self._await(piece)
        if self._holds[piece] != layer:
            self._unpack(layer)
        if self._stream is not None:
            self._begin_after(layer, self._stream)

    def rows(self, parameter: str) -> Tensor:
        """An embedding or head [vocabulary, hidden], there until the next layer or head is unpacked."""
        config = self._weights.config
        shape = (config.vocab_size, config.hidden_size)
        out = self._memory[0][: math.prod(shape)].view(shape)
        self._await(0)
        self._holds[0] = None
        self._weights.unpack(parameter, out)
        return out

    def _begin_after(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Unpack the first of the following layers that is not kept, unless that has begun."""
        turn = bisect.bisect_right(self._turns, layer)
        if turn == len(self._turns):
            return
        following, piece = self._turns[turn], turn % 2
        if self._holds[piece] == following:
            return
        # The last reader of this half, two turns before, is on the current stream.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._unpack(following)
        self._ready[piece] = stream.record_event()

    def _await(self, piece: int) -> None:
        """Have the current stream wait for what is being unpacked to a half."""
        if self._stream is not None and piece < 2 and (ready := self._ready[piece]) is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(ready)

    def _unpack(self, layer: int) -> None:
        for name, view in self.views(layer).items():
            self._weights.unpack(name, view)
        self._holds[self._pieces[layer]] = layer


@functools.lru_cache(maxsize=1)
def _rooms(config: ModelConfig) -> Sequence[int]:
    """Elements of each layer's piece of scratch memory."""
    model = build_model(config, device="meta", dtype=torch.float32)
    return [sum(map(_room, shapes.values())) for shapes in _matrices(model)]


def _sizes(config: ModelConfig, rooms: Sequence[int], own: list[int]) -> list[int]:
    """Elements of the pieces of scratch memory: the two halves, and one for each layer in `own`."""
    most = max((room for layer, room in enumerate(rooms) if layer not in own), default=0)
    return [max(most, config.vocab_size * config.hidden_size), most, *(rooms[layer] for layer in own)]


def spaced(layers: int, count: int) -> list[int]:
    """`count` layers, or all, as evenly apart as may be."""
    return [layer for layer in range(layers) if (layer + 1) * count // layers > layer * count // layers]


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
