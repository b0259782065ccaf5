"""The shapes of the buffers, and who may touch them.

Exchange buffers are tile-major, [tiles, R, 8]: see `headrace.step.operations`. They hold one version at a
time, so the plan's counters must keep a writer from overtaking a reader; the checker proves that they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from headrace.step.isa import DIGIT_BINS, DIGITS, MAX_CHUNKS, TILE_ROWS, TOP_LOGPROBS, Buffer
from headrace.step.sizes import Sizes

ALIGNMENT = 1024  # bytes, of every buffer

# The records that sampling exchanges, as they lie in memory; a top entry is a raw logit and its token.
STAT = np.dtype(
    [
        ("largest", "<f4"),  # raw logit
        ("best", "<f4"),  # largest adjusted logit
        ("token", "<i4"),  # of `best`
        ("zero", "<i4"),
        ("sum", "<f8"),  # of exp(raw logit - largest)
        ("zeros", "<i4", (2,)),
    ]
)
CANDIDATE = np.dtype(
    [
        ("value", "<f8"),  # score + noise
        ("token", "<i4"),
        ("raw", "<f4"),  # logit of `token`
        ("stop", "<i4"),
        ("zeros", "<i4", (3,)),
        ("top", [("raw", "<f4"), ("token", "<i4")], (TOP_LOGPROBS,)),
    ]
)
STAT_WORDS = STAT.itemsize // 4
CANDIDATE_WORDS = CANDIDATE.itemsize // 4


class Scope(StrEnum):
    """EXCHANGE: any SM may read what another wrote. PRIVATE: every SM touches its own part or copy only.

    OUTSIDE: lives longer than a launch and is shared with the host.
    """

    EXCHANGE = "exchange"
    PRIVATE = "private"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Shape, element type (as NumPy and torch name it) and scope."""

    shape: tuple[int, ...]
    dtype: str
    scope: Scope

    @property
    def bytes(self) -> int:
        size = {"bfloat16": 2, "float32": 4, "int32": 4, "uint64": 8}[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


def buffer_specs(sizes: Sizes) -> dict[Buffer, BufferSpec]:
    """Every buffer that a plan for these sizes uses, but for ROW_STATE, KV_PAGES and TOKEN_RING.

    ROW_STATE is, in every SM's own copy, for each row: active, slot, token (fed in this step), position,
    tokens made in this launch. KV_PAGES is `headrace.model.kv.KVCache`.
    """
    rows = sizes.rows

    def tiled(tiles: int, dtype: str, scope: Scope = Scope.EXCHANGE) -> BufferSpec:
        return BufferSpec((tiles, rows, TILE_ROWS), dtype, scope)

    def exchange(shape: tuple[int, ...], dtype: str) -> BufferSpec:
        return BufferSpec(shape, dtype, Scope.EXCHANGE)

    specs = {
        Buffer.X: tiled(sizes.residual_tiles, "bfloat16"),
        Buffer.RESIDUAL: tiled(sizes.residual_tiles, "float32", Scope.PRIVATE),
        Buffer.ROUTER_LOGITS: tiled(sizes.router_tiles, "float32"),
        Buffer.QKV: tiled(sizes.kv_heads * sizes.qkv_tiles, "bfloat16"),
        Buffer.PARTIALS: exchange((rows, sizes.kv_heads, MAX_CHUNKS, sizes.partial_floats), "float32"),
        Buffer.ATTENTION_OUT: tiled(sizes.attention_tiles, "bfloat16"),
        Buffer.HIDDEN: tiled(sizes.hidden_tiles, "bfloat16"),
        Buffer.SHARED_HIDDEN: tiled(sizes.shared_tiles, "bfloat16"),
        Buffer.LOGITS: tiled(sizes.vocabulary_tiles, "float32", Scope.PRIVATE),
        Buffer.STATS: exchange((sizes.sms, rows, STAT_WORDS), "int32"),
        Buffer.HISTOGRAM: exchange((2 * DIGITS, rows, DIGIT_BINS), "uint64"),
        Buffer.TIES: exchange((2, sizes.sms, rows), "int32"),
        Buffer.CANDIDATES: exchange((sizes.sms, rows, CANDIDATE_WORDS), "int32"),
    }
    return {buffer: spec for buffer, spec in specs.items() if spec.bytes}


def scope(buffer: Buffer) -> Scope:
    """The scope of any buffer, those without a shape included."""
    if buffer in (Buffer.RESIDUAL, Buffer.LOGITS, Buffer.ROW_STATE):
        return Scope.PRIVATE
    return Scope.OUTSIDE if buffer in (Buffer.KV_PAGES, Buffer.TOKEN_RING) else Scope.EXCHANGE


def arena(specs: Mapping[Buffer, BufferSpec]) -> tuple[dict[Buffer, int], int]:
    """Where every buffer begins in one piece of memory, in bytes, and how large that is."""
    offsets, end = {}, 0
    for buffer, spec in specs.items():
        offsets[buffer] = end
        end += -(-spec.bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
