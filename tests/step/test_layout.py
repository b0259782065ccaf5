"""Where weights lie: against the documented order said element by element, and there and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.build import build_model
from headrace.model.config import ModelConfig, Rope
from headrace.model.names import hugging_face_names
from headrace.model.presets import NORTH_MINI_CODE
from headrace.model.synthetic import synthetic_model
from headrace.step.isa import PAGE_BYTES_MAX, UNIT
from headrace.step.layout import UNIT_ELEMENTS, dense
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.weights import Kind, Matrix, pages_per_tile, weight_map
from tests.step.configs import TINY, configs


def element(packed: PackedWeights, matrix: Matrix, row: int, column: int, expert: int = 0) -> float:
    """One element of a matrix, by the order of tiles and column blocks."""
    at = (matrix.offset + expert * matrix.stride) * UNIT_ELEMENTS
    at += row // 8 * 8 * matrix.k + column // 32 * 8 * 32 + row % 8 * 32 + column % 32
    return float(packed.data[at])


@pytest.fixture(scope="module")
def packed() -> PackedWeights:
    return pack_model(synthetic_model(TINY), device="cpu", dtype=torch.float32)


def test_embedding_rows_lie_eight_to_a_tile(packed: PackedWeights) -> None:
    embedding, matrix = packed.get("embed.weight"), packed.map.get(Kind.EMBEDDING)
    for row, column in ((0, 0), (7, 63), (8, 0), (99, 31), (99, 32)):
        assert element(packed, matrix, row, column) == embedding[row, column]
    assert not dense(packed.data, matrix)[0, 100:].any()  # padding


def test_gate_and_up_take_turns(packed: PackedWeights) -> None:
    matrix = packed.map.get(Kind.EXPERT_UP, 1)
    gate_up = packed.get("blocks.1.mlp.experts.gate_up")
    for expert, row, column in ((0, 0, 0), (5, 31, 63), (3, 9, 40)):
        assert element(packed, matrix, 2 * row, column, expert) == gate_up[expert, row, column]
        assert element(packed, matrix, 2 * row + 1, column, expert) == gate_up[expert, 32 + row, column]


def test_projections_lie_by_kv_head(packed: PackedWeights) -> None:
    matrix = packed.map.get(Kind.QKV, 2)
    q, k, v = (packed.get(f"blocks.2.attention.{part}.weight") for part in "qkv")
    rows = dense(packed.data, matrix)[0]
    expected = torch.cat([q[:64], k[:32], v[:32], q[64:], k[32:], v[32:]])
    assert torch.equal(rows, expected)


def test_half_split_pairs_lie_side_by_side() -> None:
    layers = tuple(replace(layer, rope=Rope.HALF_SPLIT) for layer in TINY.layers)
    packed = pack_model(synthetic_model(replace(TINY, layers=layers)), device="cpu", dtype=torch.float32)
    rows = dense(packed.data, packed.map.get(Kind.QKV, 0))[0]
    q, k, v = (packed.get(f"blocks.0.attention.{part}.weight") for part in "qkv")
    for head, begin in ((q[:32], 0), (q[32:64], 32), (k[:32], 64)):
        assert torch.equal(rows[begin : begin + 32 : 2], head[:16])
        assert torch.equal(rows[begin + 1 : begin + 32 : 2], head[16:])
    assert torch.equal(rows[96:128], v[:32])


@settings(max_examples=40)
@given(config=configs())
def test_everything_packed_comes_back(config: ModelConfig) -> None:
    """Every weight is another number, so nothing lies on top of anything else, and the rest is padding."""
    packed = PackedWeights(config, device="cpu", dtype=torch.float64)
    parameters = dict(build_model(config, device="meta", dtype=torch.float32).named_parameters())
    assert set(packed.parameters) == set(parameters)
    given, end = {}, 1
    for name, values in parameters.items():
        given[name] = torch.arange(end, end + values.numel(), dtype=torch.float64).view(values.shape)
        end += values.numel()
        packed.put(name, given[name])
    for name, expected in given.items():
        assert torch.equal(packed.get(name), expected.to(packed.get(name).dtype)), name
    matrices = sum(values.numel() for values in parameters.values() if values.dim() > 1)
    assert int((packed.data != 0).sum()) == matrices


@settings(max_examples=40)
@given(config=configs())
def test_matrices_lie_end_to_end(config: ModelConfig) -> None:
    end = 0
    for matrix in weight_map(config).matrices.values():
        assert matrix.offset == end
        assert (
            matrix.tiles * matrix.pages_per_tile * matrix.page_bytes * matrix.experts == matrix.units * UNIT
        )
        end += matrix.units
    assert end == weight_map(config).units


@given(blocks=st.integers(1, 600))
def test_pages_are_equal_whole_and_as_few_as_possible(blocks: int) -> None:
    pages = pages_per_tile(blocks * 32)
    fitting = [n for n in range(1, blocks + 1) if blocks % n == 0 and blocks // n * UNIT <= PAGE_BYTES_MAX]
    assert pages == fitting[0]


def test_north_takes_its_parameters_and_no_more() -> None:
    weights = weight_map(NORTH_MINI_CODE)
    stored = sum(int(np.prod(tensor.shape)) for tensor in hugging_face_names(NORTH_MINI_CODE))
    assert weights.bytes + 2 * len(weights.norms) * 2048 == 2 * stored
