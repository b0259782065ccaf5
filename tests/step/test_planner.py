"""What plans look like: sizes, balance, the order within a layer, and models that have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.model.config import DenseMLP, ModelConfig, MoEMLP
from headrace.model.presets import NORTH_MINI_CODE, SMOLLM2_135M
from headrace.step.errors import PlanError
from headrace.step.isa import Field, Opcode
from headrace.step.machine import Machine
from headrace.step.planner import build_plan
from headrace.step.report import static_bytes, summary
from tests.step.configs import TINY

NORTH = build_plan(NORTH_MINI_CODE, rows=1, sms=132)


def order(config: ModelConfig, layer: int, rows: int = 1) -> list[str]:
    """The operations of a layer on the only SM."""
    plan = build_plan(config, rows=rows, sms=1)
    layered = [words for words in plan.tasks(0) if words[Field.OPCODE] not in (Opcode.EMBED, Opcode.LM_HEAD)]
    names = [Opcode(words[Field.OPCODE]).name for words in layered if words[Field.LAYER] == layer]
    return [name for name in dict.fromkeys(names) if not name.startswith("SAMPLE")]


def test_the_measured_order_within_a_layer() -> None:
    assert order(TINY, 1) == [
        "ROUTER", "QKV_PROJ", "ATTENTION", "EXPERT_UP", "ATTENTION_MERGE", "O_PROJ", "EXPERT_DOWN",
    ]  # fmt: skip
    assert order(TINY, 0) == ["QKV_PROJ", "ATTENTION", "FFN_UP", "ATTENTION_MERGE", "O_PROJ", "FFN_DOWN"]


def test_the_router_comes_after_queries_where_rows_are_many() -> None:
    assert order(TINY, 1, rows=4)[:3] == ["ROUTER", "QKV_PROJ", "ATTENTION"]
    assert order(TINY, 1, rows=8)[:3] == ["QKV_PROJ", "ROUTER", "ATTENTION"]


def test_a_sequential_block_is_another_list_of_the_same_operations() -> None:
    assert order(SMOLLM2_135M, 3) == [
        "QKV_PROJ", "ATTENTION", "ATTENTION_MERGE", "O_PROJ", "FFN_UP", "FFN_DOWN",
    ]  # fmt: skip


def test_shared_experts_are_a_dense_layer_beside_the_routed_ones() -> None:
    mlp = MoEMLP(width=32, experts=6, top_k=2, shared_experts=1)
    layers = (replace(TINY.layers[0], mlp=mlp),)
    assert order(replace(TINY, layers=layers), 0) == [
        "ROUTER", "QKV_PROJ", "ATTENTION", "EXPERT_UP", "FFN_UP", "ATTENTION_MERGE", "O_PROJ", "FFN_DOWN",
        "EXPERT_DOWN",
    ]  # fmt: skip


def test_north_reads_its_weights_evenly() -> None:
    """What a step reads whatever its routing: 1,074 MB of head, and 49 layers of 37.7 MB and a router."""
    total = 262144 * 4096 + 49 * (5120 * 4096 + 2048 * 8192) + 48 * 128 * 4096 + 3 * 3072 * 4096
    amounts = static_bytes(NORTH)
    assert amounts.sum() == total
    assert amounts.max() < 1.02 * amounts.mean()


def test_no_sm_has_more_than_its_share_before_a_hop() -> None:
    """656 tiles of router and QKV over 132 SMs: 5 at most."""
    words = NORTH.descriptors
    for layer in range(1, 49):
        chosen = np.isin(words[:, :, Field.OPCODE], [Opcode.ROUTER, Opcode.QKV_PROJ])
        chosen &= words[:, :, Field.LAYER] == layer
        assert (words[:, :, Field.TILE_COUNT] * chosen).sum(axis=1).max() == 5


@pytest.mark.parametrize(("sms", "heads_apart"), [(132, True), (114, False)])
def test_no_sm_has_queries_of_two_heads_where_heads_share_the_sms_out(sms: int, heads_apart: bool) -> None:
    """4 heads, 33 SMs each and four tiles of the router: tiles of two heads would be two tasks."""
    words = (NORTH if sms == 132 else build_plan(NORTH_MINI_CODE, rows=1, sms=sms)).descriptors
    own = (words[:, :, Field.OPCODE] == Opcode.QKV_PROJ) & (words[:, :, Field.LAYER] == 5)
    assert (own.sum(axis=1).max() == 1) == heads_apart
    tiles = (words[:, :, Field.TILE_COUNT] * own).sum(axis=1)
    assert tiles.sum() == 640
    if heads_apart:
        assert (tiles.reshape(4, 33).sum(axis=1) == 160).all()
        routers = (words[:, :, Field.OPCODE] == Opcode.ROUTER) & (words[:, :, Field.LAYER] == 5)
        assert (routers.sum(axis=1).reshape(4, 33).sum(axis=1) == 4).all()


def test_no_merger_has_tiles_of_two_heads() -> None:
    """512 tiles, 16 a head, in 128 fours: with tiles of two heads an SM would go through all rows twice."""
    words = NORTH.descriptors
    merges = words[words[:, :, Field.OPCODE] == Opcode.ATTENTION_MERGE]
    assert len(merges) == 49 * 128
    assert (merges[:, Field.TILE_COUNT] == 4).all()
    assert (merges[:, Field.FIRST_TILE] % 4 == 0).all()


def test_shares_move_from_sm_to_sm() -> None:
    """132 does not divide the tiles of 8 experts; the SMs that get one less are not always the same."""
    words = NORTH.descriptors
    chosen = words[:, :, Field.OPCODE] == Opcode.EXPERT_UP
    shares = words[:, :, Field.SHARE][chosen].reshape(132, 48)
    assert all(sorted(column) == list(range(132)) for column in shares.T.tolist())
    tiles = (shares + 1) * 768 // 132 - shares * 768 // 132
    assert tiles.sum(axis=1).max() - tiles.sum(axis=1).min() < 24  # of 279; never moved it would be 48


def test_the_summary_names_the_sizes() -> None:
    figures = summary(NORTH)
    # Numbers of bfloat16 by hand: 32 heads of queries and as many inputs of O, 4 of keys and of values; the
    # first layer's feed-forward, then 128 rows of a router and 128 experts in each of the others.
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    weights = 262_144 * 2048 + 49 * attention + 3 * 2048 * 3072 + 48 * 128 * (2048 + 3 * 2048 * 768)
    assert figures["Weights"] == f"{2 * weights:,} bytes of pages"
    assert figures["Tasks"].startswith(f"{NORTH.lengths.sum():,}")
    assert figures["Ring"] == "12 pages, 1 to 3 under way"


def test_the_summary_of_a_machine_that_has_one_page_under_way() -> None:
    plan = build_plan(TINY, rows=1, sms=3, machine=Machine(ring_pages=11, in_flight=1))
    assert summary(plan)["Ring"] == "11 pages, 1 under way"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 72}, "hidden_size is 72: a plan needs a multiple of 32"),
        ({"num_heads": 4, "head_dim": 20}, "num_heads . head_dim is 80: a plan needs a multiple of 32"),
        ({"num_heads": 4, "head_dim": 40}, "head_dim is 40: a plan needs a multiple of 16"),
        ({"head_dim": 256}, "head_dim is 256: 64 keys take 32768 bytes, and a page has 16384"),
        (
            {"layers": (replace(TINY.layers[0], mlp=DenseMLP(width=100)),)},
            "the feed-forward width is 100: a plan needs a multiple of 32",
        ),
    ],
)
def test_models_without_a_plan_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build_plan(replace(TINY, **changes), rows=1, sms=1)  # type: ignore[arg-type]


def test_capacities_without_a_kernel_are_refused() -> None:
    with pytest.raises(PlanError, match="rows is 3: a plan is for one of 1, 2, 4, 8, 16 rows"):
        build_plan(TINY, rows=3, sms=1)
    with pytest.raises(PlanError, match="sms is 0: a plan needs at least 1"):
        build_plan(TINY, rows=1, sms=0)
