"""The order of a model's weights within their pages, and back.

A tile is 8 rows of a matrix (n of the multiplication) and all its K columns. It is stored in blocks of 32
columns, a block row after row, 64 bytes each:

    [K // 32][row % 8][K % 32]          and all tiles, [rows // 8], one after the other

So lane 4n + c of a warp gets its part of a block, columns 8c .. 8c + 7 of row n, with one 16-byte load, and a
warp's loads meet no bank conflict. These eight are its B operands of two mma.sync.m16n8k16, in place of
columns 2c, 2c + 1, 2c + 8 and 2c + 9, twice. A sum does not mind how k is numbered if both factors agree: the
same lane takes elements 8c .. 8c + 7 of its row of activations, which in a tile-major buffer are 16 bytes,
too. Pages are cut between column blocks.

Which row comes where:

    gate and up     in turn: gate 0, up 0, gate 1, up 1 ... A lane's two results are one gate and its up.
    q, k, v         by KV head: its query heads, its key, its value.
    rotary pairs    half split: rows i and i + head_dim / 2 of a query or key head lie at 2i and 2i + 1.
                    So a lane's two results are a pair, as they are by nature where pairs are interleaved.

Everything here is a view: the same lines pack and unpack, on any device, with one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.config import DenseMLP, ModelConfig, Rope
from headrace.step.isa import ELEMENT_BYTES, K_BLOCK, TILE_ROWS, UNIT
from headrace.step.weights import Kind, Matrix, WeightMap

UNIT_ELEMENTS = UNIT // ELEMENT_BYTES


def rows_of(weights: Tensor, matrix: Matrix) -> Tensor:
    """A view of one matrix in the array: [experts, tiles of 8 rows, 8, K // 32, 32], padding included.

    `weights` is the whole array, one-dimensional, of any element type: offsets count elements, not bytes.
    """
    begin, size = matrix.offset * UNIT_ELEMENTS, matrix.units * UNIT_ELEMENTS
    tiles = weights[begin : begin + size].view(matrix.experts, -1, matrix.k // K_BLOCK, TILE_ROWS, K_BLOCK)
    return tiles.transpose(2, 3)


def dense(weights: Tensor, matrix: Matrix) -> Tensor:
    """One matrix as a plain one, a copy: [experts, rows as stored, K], padding included."""
    return rows_of(weights, matrix).flatten(1, 2).flatten(2)


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a parameter, and where they lie.

    `stored` is a view of the array. `natural` makes a view of the same shape of the rows as the model has
    them, so that copying one to the other packs, and back unpacks.
    """

    parameter: str
    rows: slice
    stored: Tensor
    experts: bool = False
    half_split: bool = False

    def natural(self, part: Tensor) -> Tensor:
        """A view of the parameter's rows, [rows, K] or [experts, rows, K], in the shape of `stored`."""
        shape = self.stored.shape
        if not self.half_split:
            return part.view(shape)
        return part.view(*shape[:-5], 2, *shape[-5:-3], *shape[-2:]).movedim(-5, -3)

    def one(self, expert: int) -> Place:
        """The same rows of one expert."""
        return Place(self.parameter, self.rows, self.stored[expert], half_split=self.half_split)

    def pack(self, part: Tensor) -> None:
        """Copy the rows in, converting their type."""
        self.stored.copy_(self.natural(part))

    def unpack(self) -> Tensor:
        """The rows as the model has them, a copy."""
        columns = self.stored.shape[-2] * self.stored.shape[-1]
        shape = (self.stored.shape[0], -1, columns) if self.experts else (-1, columns)
        part = torch.empty(self.stored.numel(), dtype=self.stored.dtype, device=self.stored.device).view(
            shape
        )
        self.natural(part).copy_(self.stored)
        return part


def places(config: ModelConfig, weights_map: WeightMap, weights: Tensor) -> Iterator[Place]:
    """Where every row of every matrix of a model lies in the array; norms are not in it."""
    embedding = rows_of(weights, weights_map.get(Kind.EMBEDDING))[0]
    yield from _plain("embed.weight", embedding, config.vocab_size)
    if not config.tied_head:
        yield from _plain("head.weight", rows_of(weights, weights_map.get(Kind.HEAD))[0], config.vocab_size)
    for layer in range(config.num_layers):
        matrices = {
            kind: rows_of(weights, matrix)
            for (kind, of), matrix in weights_map.matrices.items()
            if of == layer
        }
        yield from _attention(config, layer, matrices)
        yield from _feed_forward(config, layer, matrices)


def _plain(parameter: str, stored: Tensor, rows: int) -> Iterator[Place]:
    """Rows in their own order; the last tile may be filled up with padding."""
    whole = rows // TILE_ROWS
    if whole:
        yield Place(parameter, slice(0, whole * TILE_ROWS), stored[:whole])
    if rest := rows % TILE_ROWS:
        yield Place(parameter, slice(whole * TILE_ROWS, rows), stored[whole, :rest])


def _attention(config: ModelConfig, layer: int, matrices: dict[Kind, Tensor]) -> Iterator[Place]:
    name, group = f"blocks.{layer}.attention", config.num_heads // config.num_kv_heads
    split = config.layers[layer].rope is Rope.HALF_SPLIT
    heads = _split(matrices[Kind.QKV][0], -4, config.num_kv_heads, group + 2)
    for part, stored in (("q", heads[:, :group]), ("k", heads[:, group])):
        turned = _split(stored, -3, TILE_ROWS // 2) if split else stored
        yield Place(f"{name}.{part}.weight", slice(None), turned, half_split=split)
    yield Place(f"{name}.v.weight", slice(None), heads[:, group + 1])
    yield from _plain(f"{name}.o.weight", matrices[Kind.O][0], config.hidden_size)


def _feed_forward(config: ModelConfig, layer: int, matrices: dict[Kind, Tensor]) -> Iterator[Place]:
    name, mlp = f"blocks.{layer}.mlp", config.layers[layer].mlp
    if isinstance(mlp, DenseMLP):
        yield from _gated(name, matrices[Kind.FFN_UP][0], matrices[Kind.FFN_DOWN][0])
        return
    yield from _plain(f"{name}.router.weight", matrices[Kind.ROUTER][0], mlp.experts)
    gate, up = _split(matrices[Kind.EXPERT_UP], -3, TILE_ROWS // 2).unbind(-3)
    yield Place(f"{name}.experts.gate_up", slice(0, mlp.width), gate, experts=True)
    yield Place(f"{name}.experts.gate_up", slice(mlp.width, 2 * mlp.width), up, experts=True)
    yield Place(f"{name}.experts.down", slice(None), matrices[Kind.EXPERT_DOWN], experts=True)
    if mlp.shared_experts:
        yield from _gated(f"{name}.shared", matrices[Kind.SHARED_UP][0], matrices[Kind.SHARED_DOWN][0])


def _gated(name: str, up: Tensor, down: Tensor) -> Iterator[Place]:
    for part, stored in zip(("gate", "up"), _split(up, -3, TILE_ROWS // 2).unbind(-3), strict=True):
        yield Place(f"{name}.{part}.weight", slice(None), stored)
    yield Place(f"{name}.down.weight", slice(None), down)


def _split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """A view with dimension `dim`, counted from the end, split into `sizes` and what is left."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], *sizes, shape[dim] // math.prod(sizes), *shape[dim + 1 :])
