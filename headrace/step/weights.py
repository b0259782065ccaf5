"""Where every weight of a model lies in the one array that the pages are copied from.

A matrix is stored tile by tile, a tile page by page (`headrace.step.layout` has the order within), and the
experts of a layer one after the other. Offsets count units of UNIT bytes. Norms are an array of their own,
float32 [norms, hidden].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from headrace.model.config import DenseMLP, ModelConfig
from headrace.step.isa import ELEMENT_BYTES, K_BLOCK, PAGE_BYTES_MAX, TILE_ROWS, UNIT
from headrace.step.sizes import tiles


class Kind(StrEnum):
    """The matrices of a model. UP kinds hold gate and up, a row of each in turn."""

    EMBEDDING = "embedding"
    HEAD = "head"
    QKV = "qkv"
    O = "o"  # noqa: E741  the projection's usual name
    ROUTER = "router"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    FFN_UP = "ffn_up"
    FFN_DOWN = "ffn_down"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"


PAIRED = frozenset({Kind.EXPERT_UP, Kind.FFN_UP, Kind.SHARED_UP})


def pages_per_tile(k: int) -> int:
    """The fewest equal pages of whole column blocks that 8 rows of K columns fill."""
    blocks, most = k // K_BLOCK, PAGE_BYTES_MAX // UNIT
    pages = -(-blocks // most)
    while blocks % pages:
        pages += 1
    return pages


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, or the same matrix of every expert: `outputs` rows (padded to tiles) of `k` columns.

    `tile_rows` is 16 for the kinds in PAIRED, whose `outputs` rows are gate and up together.
    """

    kind: Kind
    layer: int
    offset: int
    outputs: int
    k: int
    experts: int = 1

    @property
    def tile_rows(self) -> int:
        return TILE_ROWS * 2 if self.kind in PAIRED else TILE_ROWS

    @property
    def tiles(self) -> int:
        return tiles(self.outputs) * TILE_ROWS // self.tile_rows

    @property
    def pages_per_tile(self) -> int:
        return pages_per_tile(self.k) * self.tile_rows // TILE_ROWS

    @property
    def page_bytes(self) -> int:
        return TILE_ROWS * self.k * ELEMENT_BYTES // pages_per_tile(self.k)

    @property
    def tile_units(self) -> int:
        return self.pages_per_tile * self.page_bytes // UNIT

    @property
    def stride(self) -> int:
        """Units from one expert to the next."""
        return self.tiles * self.tile_units

    @property
    def units(self) -> int:
        return self.experts * self.stride


@dataclass(frozen=True)
class WeightMap:
    """All matrices of a model in the order of their offsets, and the names of its norms."""

    matrices: dict[tuple[Kind, int], Matrix]
    norms: tuple[str, ...]

    @property
    def units(self) -> int:
        return sum(matrix.units for matrix in self.matrices.values())

    @property
    def bytes(self) -> int:
        return self.units * UNIT

    def get(self, kind: Kind, layer: int = 0) -> Matrix:
        return self.matrices[kind, layer]


def weight_map(config: ModelConfig) -> WeightMap:
    """The embedding first (a tied head is the same pages), then layer after layer, then a head of its own."""
    matrices: dict[tuple[Kind, int], Matrix] = {}
    offset = 0
    for kind, layer, outputs, k, experts in _shapes(config):
        matrix = Matrix(kind, layer, offset, outputs, k, experts)
        matrices[kind, layer] = matrix
        offset += matrix.units
    return WeightMap(matrices, tuple(norm_names(config)))


def _shapes(config: ModelConfig) -> Iterator[tuple[Kind, int, int, int, int]]:
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    yield Kind.EMBEDDING, 0, config.vocab_size, hidden, 1
    for layer, described in enumerate(config.layers):
        mlp = described.mlp
        yield Kind.QKV, layer, width + 2 * config.num_kv_heads * config.head_dim, hidden, 1
        yield Kind.O, layer, hidden, width, 1
        if isinstance(mlp, DenseMLP):
            yield Kind.FFN_UP, layer, 2 * mlp.width, hidden, 1
            yield Kind.FFN_DOWN, layer, hidden, mlp.width, 1
            continue
        yield Kind.ROUTER, layer, mlp.experts, hidden, 1
        yield Kind.EXPERT_UP, layer, 2 * mlp.width, hidden, mlp.experts
        yield Kind.EXPERT_DOWN, layer, hidden, mlp.width, mlp.experts
        if mlp.shared_experts:
            yield Kind.SHARED_UP, layer, 2 * mlp.shared_experts * mlp.width, hidden, 1
            yield Kind.SHARED_DOWN, layer, hidden, mlp.shared_experts * mlp.width, 1
    if not config.tied_head:
        yield Kind.HEAD, 0, config.vocab_size, hidden, 1


def norm_names(config: ModelConfig) -> Iterator[str]:
    """The parameters of a model's norms, by their index in the plan."""
    for layer in range(config.num_layers):
        names = ("norm",) if config.parallel_block else ("attention_norm", "mlp_norm")
        yield from (f"blocks.{layer}.{name}.weight" for name in names)
    yield "norm.weight"
