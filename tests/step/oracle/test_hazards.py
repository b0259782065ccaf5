"""What is wrong with a plan is found and named, in the planner's order and in others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.model.config import ModelConfig
from headrace.model.sampling import SamplingParams
from headrace.step.isa import Buffer, Field, Opcode, Round
from headrace.step.oracle.errors import HazardError, StuckError
from headrace.step.oracle.order import Order, PlannerOrder, RandomOrder
from headrace.step.oracle.rows import LaunchRow
from headrace.step.plan import Plan
from tests.step.oracle.setting import World, north, plan_of, sequential

ORDERS: list[Order] = [PlannerOrder(), RandomOrder(1), RandomOrder(2)]
SAMPLED = SamplingParams(top_k=5, top_p=0.9)
Change = dict[str, int]


@pytest.fixture(scope="module")
def worlds() -> dict[bool, World]:
    """By whether blocks are parallel."""
    return {parallel: World(config_of(parallel), [90, 64]) for parallel in (True, False)}


@pytest.fixture(scope="module")
def world(worlds: dict[bool, World]) -> World:
    return worlds[True]


def config_of(parallel: bool) -> ModelConfig:
    return north() if parallel else sequential()


def broken(
    opcode: Opcode,
    change: Change,
    *,
    sm: int | None = None,
    layer: int | None = None,
    parallel: bool = True,
) -> Plan:
    """The plan for three SMs with fields of the tasks of one operation set, or moved (`_by`)."""
    plan = plan_of(config_of(parallel), 2, 3)
    words = plan.descriptors.copy()
    chosen = words[:, :, Field.OPCODE] == opcode
    if sm is not None:
        chosen[[other for other in range(3) if other != sm]] = False
    if layer is not None:
        chosen &= words[:, :, Field.LAYER] == layer
    assert chosen.any()
    for name, value in change.items():
        if name.endswith("_by"):
            words[chosen, Field[name.removesuffix("_by").upper()]] += value
        else:
            words[chosen, Field[name.upper()]] = value
    return replace(plan, descriptors=words)


def run(world: World, plan: Plan, order: Order, *, steps: int = 2) -> None:
    list(world.oracle_of(plan, order=order).launch(world.rows(SAMPLED), steps))


def assert_found(world: World, plan: Plan, order: Order, opcode: Opcode, buffer: Buffer) -> None:
    """In the planner's order the reader comes too early and is named; in others it may be the writer."""
    task = f"{opcode.name} of layer" if isinstance(order, PlannerOrder) else ""
    with pytest.raises(HazardError, match=rf"{task}.*{buffer.name}"):
        run(world, plan, order)


NO_WAIT = {"wait_counter": 0}
NO_ROUTER = {"loader_counter": 0, "second_counter": 0}

# A wait that is gone, and the data that it had protected. Many waits of a plan follow from others, above all
# in parallel blocks; these do not.
UNPROTECTED = [
    (True, Opcode.ROUTER, NO_WAIT, Buffer.X),
    (True, Opcode.QKV_PROJ, NO_WAIT, Buffer.X),
    (True, Opcode.ATTENTION, NO_WAIT, Buffer.QKV),
    (True, Opcode.ATTENTION, {"loader_counter": 0}, Buffer.ROW_STATE),
    (True, Opcode.ATTENTION_MERGE, NO_WAIT, Buffer.PARTIALS),
    (True, Opcode.O_PROJ, NO_WAIT, Buffer.ATTENTION_OUT),
    (True, Opcode.EXPERT_UP, NO_ROUTER, Buffer.ROUTER_LOGITS),
    (False, Opcode.EXPERT_DOWN, NO_WAIT, Buffer.HIDDEN),
    (False, Opcode.FFN_UP, NO_WAIT, Buffer.X),
    (False, Opcode.FFN_DOWN, NO_WAIT, Buffer.HIDDEN),
    (True, Opcode.LM_HEAD, NO_WAIT, Buffer.X),
    (True, Opcode.SAMPLE_SELECT, NO_WAIT, Buffer.STATS),
    (True, Opcode.SAMPLE_PICK, {"wait_counter": 0, "second_counter": 0}, Buffer.TIES),
    (True, Opcode.SAMPLE_COMMIT, NO_WAIT, Buffer.CANDIDATES),
]
NAMES = [f"{opcode.name}-{buffer.name}" for _, opcode, _, buffer in UNPROTECTED]


@pytest.mark.parametrize("order", ORDERS, ids=["planned", "random 1", "random 2"])
@pytest.mark.parametrize(("parallel", "opcode", "change", "buffer"), UNPROTECTED, ids=NAMES)
def test_a_wait_that_is_gone(
    worlds: dict[bool, World], parallel: bool, opcode: Opcode, change: Change, buffer: Buffer, order: Order
) -> None:
    assert_found(worlds[parallel], broken(opcode, change, parallel=parallel), order, opcode, buffer)


# The arrivals of one SM fewer than there are: one SM's signal is not waited for.
TOO_FEW = [
    (True, Opcode.QKV_PROJ, -6, Buffer.X),
    (True, Opcode.ATTENTION, -6, Buffer.QKV),
    (True, Opcode.ATTENTION_MERGE, -1, Buffer.PARTIALS),
    (True, Opcode.O_PROJ, -6, Buffer.ATTENTION_OUT),
    (False, Opcode.EXPERT_DOWN, -1, Buffer.HIDDEN),
    (True, Opcode.LM_HEAD, -6, Buffer.X),
    (True, Opcode.SAMPLE_COMMIT, -1, Buffer.CANDIDATES),
]


@pytest.mark.parametrize("order", ORDERS, ids=["planned", "random 1", "random 2"])
@pytest.mark.parametrize(("parallel", "opcode", "fewer", "buffer"), TOO_FEW)
def test_a_target_that_is_too_small(
    worlds: dict[bool, World], parallel: bool, opcode: Opcode, fewer: int, buffer: Buffer, order: Order
) -> None:
    plan = broken(opcode, {"wait_arrivals_by": fewer}, parallel=parallel)
    assert_found(worlds[parallel], plan, order, opcode, buffer)


@pytest.mark.parametrize(
    ("opcode", "change", "message"),
    [
        (Opcode.QKV_PROJ, {"wait_arrivals_by": 1}, r"QKV_PROJ of layer 0 on SM \d.*waits for embed to be 17"),
        (
            Opcode.ATTENTION,
            {"loader_lag": 0},
            r"ATTENTION of layer 0 on SM \d.*loader.*waits for commit to be",
        ),
        (Opcode.SAMPLE_PICK, {"signal_amount": 0}, r"SAMPLE_COMMIT.*waits for pick to be 3, which is 0"),
    ],
    ids=["target too large", "lag", "no signal"],
)
def test_a_plan_that_comes_to_a_standstill(
    world: World, opcode: Opcode, change: Change, message: str
) -> None:
    with pytest.raises(StuckError, match=message):
        run(world, broken(opcode, change), PlannerOrder())


def test_a_tile_that_nobody_makes(world: World) -> None:
    plan = broken(Opcode.QKV_PROJ, {"tile_count_by": -1}, layer=1)
    with pytest.raises(HazardError, match=r"ATTENTION of layer 1.*nobody has written for it: QKV"):
        run(world, plan, PlannerOrder())


def test_a_tile_that_is_made_in_the_first_step_only(world: World) -> None:
    """What a step before left is no better than poison."""
    oracle = world.oracle_of(plan_of(north(), 2, 3))
    rows: list[LaunchRow] = world.rows(SAMPLED)
    list(oracle.launch(rows, 1))
    worse = broken(Opcode.ATTENTION_MERGE, {"tile_count_by": -1}, layer=2, sm=1)
    oracle._tasks = world.oracle_of(worse)._tasks
    with pytest.raises(HazardError, match=r"O_PROJ of layer 2.*nobody has written for it: ATTENTION_OUT"):
        list(oracle.launch(rows, 1))


def test_a_residual_tile_of_another_sm(world: World) -> None:
    plan = broken(Opcode.O_PROJ, {"first_tile_by": 1}, layer=1, sm=0)
    with pytest.raises(HazardError, match=r"O_PROJ of layer 1 on SM 0.*this SM owns tiles 0..4"):
        run(world, plan, PlannerOrder())


@pytest.mark.parametrize("order", ORDERS, ids=["planned", "random 1", "random 2"])
def test_a_buffer_that_is_used_again_too_early(world: World, order: Order) -> None:
    """Layer 2 goes by layer 1's X: it reads what is being replaced, and writes over what is still in use."""
    early = plan_of(north(), 2, 3).counters.index("down[0]")
    plan = broken(Opcode.QKV_PROJ, {"wait_counter": early}, layer=2)
    assert_found(world, plan, order, Opcode.QKV_PROJ, Buffer.X)


def test_keys_of_the_step_before_must_have_been_published(world: World) -> None:
    """The loader waits for one SM to have ended the step: the keys of others may be on their way."""
    plan = broken(Opcode.ATTENTION, {"loader_arrivals": 1})
    with pytest.raises(HazardError, match=r"ATTENTION of layer \d on SM \d .*not published to it: KV_PAGES"):
        run(world, plan, PlannerOrder())


def test_rounds_of_selection_in_the_wrong_order(world: World) -> None:
    plan = plan_of(north(), 2, 3)
    words = plan.descriptors.copy()
    ties = words[:, :, Field.OPCODE] == Opcode.SAMPLE_SELECT
    ties &= words[:, :, Field.ROUND] == Round.TOP_P_TIES
    words[ties, Field.WAIT_COUNTER] = plan.counters.index("stats")
    with pytest.raises(HazardError, match=r"SAMPLE_SELECT.*HISTOGRAM\[7"):
        run(world, replace(plan, descriptors=words), RandomOrder(1))


def orders() -> Iterator[Order]:
    yield PlannerOrder()
    yield from (RandomOrder(seed) for seed in range(6))


def test_the_plan_as_it_is_has_no_hazard(world: World) -> None:
    for order in orders():
        run(world, plan_of(north(), 2, 3), order, steps=3)
