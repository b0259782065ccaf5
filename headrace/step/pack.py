"""Fills the array of pages: from a checkpoint, tensor by tensor, or from a model in memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headrace.model.checkpoint import CheckpointError, TensorSource, open_checkpoint, unpair
from headrace.model.config import ModelConfig
from headrace.model.fused import Fused
from headrace.model.names import HEAD, StoredTensor
from headrace.model.progress import Progress, tracked
from headrace.model.synthetic import synthetic_parameters
from headrace.model.transformer import Model
from headrace.step.isa import TILE_ROWS
from headrace.step.layout import UNIT_ELEMENTS, Place, places, rows_of
from headrace.step.sizes import check_model
from headrace.step.weights import Kind, WeightMap, weight_map

# Bits are copied 16 bytes at a time, for which this type stands: a copy of elements would move 2 at a time.
_CHUNK = torch.complex128
_EXPERTS = re.compile(r"blocks\.(\d+)\.mlp\.experts\.(gate_up|down)")
_EXPERT_KINDS = {"gate_up": Kind.EXPERT_UP, "down": Kind.EXPERT_DOWN}
_ROWS = {"embed.weight": Kind.EMBEDDING, "head.weight": Kind.HEAD}


class PackedWeights:
    """The weights of a model as a plan's tasks read them.

    `data` is the array of pages, one-dimensional: bfloat16 for the kernel, where it is `map.bytes` long; an
    interpreter may hold it in float32. `norms` is float32 [norms, hidden]. Padding is 0. Experts' matrices
    are unpacked by the kernel of `fused` if it is set.

    Raises PlanError for a model whose sizes do not fit tiles and pages.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype) -> None:
        check_model(config)
        self.config = config
        self.fused: Fused | None = None
        self.map: WeightMap = weight_map(config)
        self.data = torch.zeros(self.map.units * UNIT_ELEMENTS, dtype=dtype, device=device)
        self.norms = torch.zeros(len(self.map.norms), config.hidden_size, device=device)
        self._places: dict[str, list[Place]] = defaultdict(list)
        for place in places(config, self.map, self.data):
            self._places[place.parameter].append(place)
        self._norms = {name: index for index, name in enumerate(self.map.norms)}

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters: those of `headrace.model.transformer.Model`."""
        return (*self._places, *self._norms)

    def put(self, parameter: str, values: Tensor, region: Sequence[int | slice] = ()) -> None:
        """Copy a parameter, or the `region` of it that a checkpoint holds on its own, to its place.

        A region is one expert, or the gate or the up rows of one (`names.StoredTensor`).
        """
        if parameter in self._norms:
            self.norms[self._norms[parameter]].copy_(values)
            return
        for place in self._places[parameter]:
            if not region:
                place.pack(values[..., place.rows, :])
            elif len(region) == 1 or region[1] == place.rows:
                assert isinstance(region[0], int)
                place.one(region[0]).pack(values)

    def get(self, parameter: str) -> Tensor:
        """A parameter as the model has it, a copy: the inverse of `put`."""
        if parameter in self._norms:
            return self.norms[self._norms[parameter]].clone()
        return torch.cat([place.unpack() for place in self._places[parameter]], dim=-2)

    def unpack(self, parameter: str, out: Tensor) -> None:
        """Copy a matrix, or those of all experts, to `out`, which has its shape and the array's type."""
        if self.fused is not None and (stored := self._experts(parameter, out)) is not None:
            self.fused.unpack(stored, out, paired=parameter.endswith("gate_up"))
            return
        for place in self._places[parameter]:
            target = place.natural(out[..., place.rows, :])
            target.view(_CHUNK).copy_(place.stored.view(_CHUNK))

    def _experts(self, parameter: str, out: Tensor) -> Tensor | None:
        """What is stored of the matrices of all experts of a layer, if these have no padding."""
        match = _EXPERTS.fullmatch(parameter)
        if match is None or out.shape[1] % (2 * TILE_ROWS):
            return None
        matrix = self.map.get(_EXPERT_KINDS[match[2]], int(match[1]))
        begin, size = matrix.offset * UNIT_ELEMENTS, matrix.units * UNIT_ELEMENTS
        return self.data[begin : begin + size] if size == out.numel() else None

    def rows(self, parameter: str, ids: Tensor) -> Tensor:
        """The rows `ids` [...] of an embedding or head, a copy [..., hidden]."""
        stored = rows_of(self.data, self.map.get(_ROWS[parameter]))[0]
        return stored[ids // TILE_ROWS, ids % TILE_ROWS].flatten(-2)


@torch.no_grad()
def pack_model(
    model: Model, *, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> PackedWeights:
    """The pages of a model that is in memory."""
    packed = PackedWeights(model.config, device=device, dtype=dtype)
    parameters = dict(model.named_parameters())
    with tracked(
        progress, "Packing weights", sum(values.nbytes for values in parameters.values())
    ) as advance:
        for name, values in parameters.items():
            packed.put(name, values)
            advance(values.nbytes)
    return packed


@torch.no_grad()
def pack_synthetic(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> PackedWeights:
    """The pages of `synthetic_model` with the same seed; no more than one parameter lies beside them.

    Raises PlanError for a model that has no plan.
    """
    packed = PackedWeights(config, device=device, dtype=dtype)
    for name, values in synthetic_parameters(
        config, seed=seed, device=device, dtype=dtype, progress=progress
    ):
        packed.put(name, values)
    return packed


@torch.no_grad()
def pack_checkpoint(
    path: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    layers: int | None = None,
    progress: Progress | None = None,
) -> PackedWeights:
    """The pages of a checkpoint, a Hugging Face folder or a .gguf file; `layers`: of its first layers only.

    Tensors stream into place one by one; besides the array no more than one file is mapped at a time.
    Raises CheckpointError, and PlanError for a model that has no plan.
    """
    config, wanted, source = open_checkpoint(path)
    packed = PackedWeights(replace(config, layers=config.layers[:layers]), device=device, dtype=dtype)
    own = set(packed.parameters)
    stream(packed, [tensor for tensor in wanted if tensor.parameter in own], source, progress)
    return packed


def stream(
    packed: PackedWeights, wanted: Iterable[StoredTensor], source: TensorSource, progress: Progress | None
) -> None:
    """Copy every wanted tensor to its place.

    Raises CheckpointError if a head that the config ties to the embedding is stored and differs from it.
    """
    by_name = {tensor.name: tensor for tensor in wanted}
    stored_head: Tensor | None = None
    with tracked(progress, "Packing weights", sum(source.size(name) for name in by_name)) as advance:
        for name, values in source.tensors():
            if (tensor := by_name.get(name)) is not None:
                if tensor.paired_heads:
                    values = unpair(values, tensor.paired_heads)
                packed.put(tensor.parameter, values, tensor.region)
                advance(source.size(name))
            elif name == HEAD:
                stored_head = values.to(packed.data.device, packed.data.dtype, copy=True)
    if stored_head is not None and not torch.equal(stored_head, packed.get("embed.weight")):
        raise CheckpointError(
            f"{source.location(HEAD)}: {HEAD} differs from the embedding, but the config ties them: "
            "set tie_word_embeddings to false in config.json if the head is meant"
        )
