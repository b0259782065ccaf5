"""Plans that are broken, each in one way, and what the checker must say of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headrace.model.config import MoEMLP
from headrace.step.checker import Check, check, order
from headrace.step.isa import SAMPLING, Buffer, Field, Flag, Opcode
from headrace.step.plan import Words
from headrace.step.planner import build_plan
from tests.step.breaking import (
    LLAMA,
    PLAN,
    SMS,
    assign,
    broken,
    counter,
    drop,
    exchange,
    shift,
    swap,
    unwaited,
    where,
)
from tests.step.configs import TINY


def endless(words: Words) -> None:
    """The last task of a longest list in the place of its END."""
    sm = int(np.argmax((words[:, :, Field.OPCODE] != Opcode.END).sum(axis=1)))
    words[sm, -1] = words[sm, -2]


def twice_on_one_sm(words: Words) -> None:
    """The first SM has the second one's share of attention besides its own, in the place of its experts."""
    sms, attentions = where(words, Opcode.ATTENTION, 2)
    _, ups = where(words, Opcode.EXPERT_UP, 2)
    words[sms[0], ups[0]] = words[sms[1], attentions[1]]


def loaders_unwaited(words: Words) -> None:
    """No loader waits for anything."""
    for opcode in (Opcode.ATTENTION, Opcode.EXPERT_UP, Opcode.EXPERT_DOWN):
        for field in (Field.LOADER_COUNTER, Field.LOADER_ARRIVALS, Field.LOADER_LAG):
            words[(*where(words, opcode), field)] = 0


def one_tile_on(words: Words) -> None:
    """All SMs sample from tiles that begin one later than their own."""
    words[(*where(words, Opcode.SAMPLE_PICK), Field.FIRST_TILE)] += 1


def shares_exchanged(words: Words) -> None:
    """The last two SMs have each other's share of SAMPLE_STATS."""
    sms, tasks = where(words, Opcode.SAMPLE_STATS)
    words[sms[-2:], tasks[-2:], Field.SHARE] = words[sms[:-3:-1], tasks[:-3:-1], Field.SHARE]


def another_writer(words: Words) -> None:
    """SM 1 speaks for the step in SAMPLE_COMMIT, and SM 0 in SAMPLE_PICK."""
    sms, tasks = where(words, Opcode.SAMPLE_COMMIT)
    words[sms, tasks, Field.FLAGS] = np.where(sms == 1, int(Flag.WRITER), 0)


ONE_FAULT = {
    # fields
    "an operation that does not exist": (
        assign(Opcode.ROUTER, 2, opcode=99),
        Check.FIELDS,
        None,
        "there is no operation 99",
    ),
    "a field out of range": (
        assign(Opcode.QKV_PROJ, 2, rope=3),
        Check.FIELDS,
        Opcode.QKV_PROJ,
        "ROPE .* is 3, and must be 0 to 2",
    ),
    "no page that may be under way": (
        assign(Opcode.QKV_PROJ, 2, in_flight=0),
        Check.FIELDS,
        Opcode.QKV_PROJ,
        "IN_FLIGHT .* is 0, and must be 1 to 255",
    ),
    "a field that the operation does not use": (
        assign(Opcode.O_PROJ, 2, norm=1),
        Check.FIELDS,
        Opcode.O_PROJ,
        "NORM .* does not use it",
    ),
    "a counter that does not exist": (
        assign(Opcode.ROUTER, 2, wait_counter=9999),
        Check.FIELDS,
        Opcode.ROUTER,
        "WAIT_COUNTER .* is 9999",
    ),
    "a task after END": (
        assign(Opcode.EMBED, None, opcode=0),
        Check.FIELDS,
        None,
        "the list goes on after END",
    ),
    "a list without an end": (
        endless,
        Check.FIELDS,
        None,
        "the list does not end in END",
    ),
    "a layer that does not exist": (
        assign(Opcode.O_PROJ, 2, layer=5),
        Check.FIELDS,
        Opcode.O_PROJ,
        "LAYER .* is 5, and must be 0 to 4",
    ),
    "an input that the operation cannot have": (
        assign(Opcode.O_PROJ, 2, input=int(Buffer.X)),
        Check.FIELDS,
        Opcode.O_PROJ,
        "INPUT is X, and must be ATTENTION_OUT",
    ),
    "an output that the operation cannot have": (
        assign(Opcode.EXPERT_DOWN, 2, output=int(Buffer.LOGITS)),
        Check.FIELDS,
        Opcode.EXPERT_DOWN,
        "OUTPUT is LOGITS, and must be RESIDUAL or X",
    ),
    # targets
    "a wait that passes early": (
        shift(Opcode.O_PROJ, 2, Field.WAIT_ARRIVALS, -1),
        Check.TARGETS,
        Opcode.O_PROJ,
        r"WAIT_COUNTER waits for 15 arrivals a step at counter merge\[2\], to which a step adds 16",
    ),
    "a second wait that passes early": (
        shift(Opcode.EXPERT_DOWN, 2, Field.SECOND_ARRIVALS, -1),
        Check.TARGETS,
        Opcode.EXPERT_DOWN,
        r"SECOND_COUNTER waits .* router\[2\]",
    ),
    "a loader's wait that passes early": (
        shift(Opcode.ATTENTION, 2, Field.LOADER_ARRIVALS, -1),
        Check.TARGETS,
        Opcode.ATTENTION,
        "LOADER_COUNTER waits for 4 arrivals a step at counter commit",
    ),
    "a signal that is not given": (
        assign(Opcode.FFN_UP, 0, signal_counter=0, signal_amount=0),
        Check.TARGETS,
        Opcode.FFN_DOWN,
        r"up\[0\]",
    ),
    "a signal for less than was made": (
        shift(Opcode.QKV_PROJ, 2, Field.SIGNAL_AMOUNT, -1),
        Check.TARGETS,
        Opcode.QKV_PROJ,
        "SIGNAL_AMOUNT is .* what the task finished",
    ),
    "a signal to another's counter": (
        assign(Opcode.ROUTER, 2, one=False, signal_counter=counter("up[2]")),
        Check.TARGETS,
        Opcode.EXPERT_UP,
        r"counter up\[2\] is signalled for more than one output",
    ),
    "heads' counters that there are not": (
        assign(Opcode.ATTENTION, 2, wait_counter=len(PLAN.counters) - 1),
        Check.TARGETS,
        Opcode.ATTENTION,
        f"at counter number {len(PLAN.counters)}, to which a step adds 0",
    ),
    "arrivals at no counter": (
        assign(Opcode.SAMPLE_STATS, None, wait_arrivals=3),
        Check.TARGETS,
        Opcode.SAMPLE_STATS,
        "WAIT_ARRIVALS is 3 without a counter",
    ),
    "too few KV heads waited for": (
        assign(Opcode.ATTENTION, 2, wait_span=1),
        Check.TARGETS,
        Opcode.ATTENTION,
        "WAIT_SPAN is 1 and should be 2",
    ),
    # coverage
    "a tile that nobody makes": (
        shift(Opcode.ATTENTION_MERGE, 2, Field.TILE_COUNT, -1),
        Check.COVERAGE,
        Opcode.ATTENTION_MERGE,
        "nobody makes tile 3 of 16",
    ),
    "a task of nothing": (
        shift(Opcode.EMBED, None, Field.TILE_COUNT, -1),
        Check.COVERAGE,
        Opcode.EMBED,
        "a task without tiles",
    ),
    "an embedding that two put out": (
        shift(Opcode.EMBED, None, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.EMBED,
        "tile 1 is made 2 times",
    ),
    "queries that are made twice": (
        shift(Opcode.QKV_PROJ, 2, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.QKV_PROJ,
        "is made 2 times",
    ),
    "logits of more experts than there are": (
        shift(Opcode.ROUTER, 2, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.ROUTER,
        "tile 1 does not exist: there are 1",
    ),
    "experts whose results two add": (
        shift(Opcode.EXPERT_DOWN, 2, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.EXPERT_DOWN,
        "tile 1 is made 2 times",
    ),
    "a gate that nobody makes": (
        shift(Opcode.FFN_UP, 0, Field.TILE_COUNT, -1),
        Check.COVERAGE,
        Opcode.FFN_UP,
        "nobody makes tile .* of 12",
    ),
    "a down projection that nobody makes": (
        shift(Opcode.FFN_DOWN, 0, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.FFN_DOWN,
        "tile 1 is made 2 times",
    ),
    "a tile that is made twice": (
        shift(Opcode.O_PROJ, 2, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.O_PROJ,
        "tile 1 is made 2 times",
    ),
    "a tile that does not exist": (
        shift(Opcode.LM_HEAD, None, Field.FIRST_TILE, 99),
        Check.COVERAGE,
        Opcode.LM_HEAD,
        "does not exist",
    ),
    "an operation that is missing": (
        drop(Opcode.ATTENTION, 2),
        Check.COVERAGE,
        Opcode.ATTENTION,
        "nobody does it in layer 2",
    ),
    "a part of sampling that is missing": (
        drop(Opcode.SAMPLE_STATS),
        Check.COVERAGE,
        Opcode.SAMPLE_STATS,
        "nobody does it$",
    ),
    "a sampling round that is missing": (
        drop(Opcode.SAMPLE_SELECT),
        Check.COVERAGE,
        Opcode.SAMPLE_SELECT,
        "nobody does it in round 4",
    ),
    "a share done twice": (
        assign(Opcode.EXPERT_UP, 2, one=False, share=3),
        Check.COVERAGE,
        Opcode.EXPERT_UP,
        "share 3 is done 5 times",
    ),
    "a share that does not exist": (
        assign(Opcode.EXPERT_UP, 2, share=5),
        Check.COVERAGE,
        Opcode.EXPERT_UP,
        "share 5 of 5 does not exist",
    ),
    "a share that nobody does": (
        assign(Opcode.EXPERT_UP, 2, one=False, share=3),
        Check.COVERAGE,
        Opcode.EXPERT_UP,
        "nobody has share 0 of 5",
    ),
    "two shares for one SM": (
        twice_on_one_sm,
        Check.COVERAGE,
        Opcode.ATTENTION,
        "an SM has more than one share",
    ),
    "shares that are not as many as there are": (
        assign(Opcode.ATTENTION, 2, shares=4),
        Check.COVERAGE,
        Opcode.ATTENTION,
        "SHARES is 4 and should be 5",
    ),
    "residual tiles away from their owner": (
        exchange(Opcode.O_PROJ, 2),
        Check.COVERAGE,
        Opcode.O_PROJ,
        "FIRST_TILE is 1 and should be 0: the residual tiles that this SM embedded",
    ),
    "more residual tiles than their owner has": (
        shift(Opcode.O_PROJ, 2, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.O_PROJ,
        "TILE_COUNT is 2 and should be 1: the residual tiles that this SM embedded",
    ),
    "tiles of another KV head": (
        assign(Opcode.QKV_PROJ, 2, kv_head=1),
        Check.COVERAGE,
        Opcode.QKV_PROJ,
        "does not belong to KV head 1",
    ),
    "sampling from another's logits": (
        shift(Opcode.SAMPLE_STATS, None, Field.TILE_COUNT, 1),
        Check.COVERAGE,
        Opcode.SAMPLE_STATS,
        "TILE_COUNT is .* the tiles whose logits this SM has",
    ),
    "sampling from the next tile's logits": (
        one_tile_on,
        Check.COVERAGE,
        Opcode.SAMPLE_PICK,
        "FIRST_TILE is .* the tiles whose logits this SM has",
    ),
    "shares that go to the lowest ids last": (
        shares_exchanged,
        Check.COVERAGE,
        Opcode.SAMPLE_STATS,
        "shares do not ascend with their tiles",
    ),
    "one SM that writes tokens and another that asks for the end": (
        another_writer,
        Check.COVERAGE,
        Opcode.SAMPLE_COMMIT,
        "SM 1 is the WRITER here, and SM 0 of SAMPLE_PICK",
    ),
    "two SMs that write the tokens": (
        assign(Opcode.SAMPLE_COMMIT, None, one=False, flags=int(Flag.WRITER)),
        Check.COVERAGE,
        Opcode.SAMPLE_COMMIT,
        "5 SMs are the WRITER",
    ),
    "a flag that means nothing here": (
        assign(Opcode.SAMPLE_COMMIT, None, one=False, flags=int(Flag.WRITER | Flag.HALVE)),
        Check.COVERAGE,
        Opcode.SAMPLE_COMMIT,
        "its only flag is WRITER",
    ),
    # pages
    "the wrong weights": (
        shift(Opcode.QKV_PROJ, 2, Field.WEIGHTS, 8),
        Check.PAGES,
        Opcode.QKV_PROJ,
        "so the qkv weights lie",
    ),
    "weights of more columns": (
        shift(Opcode.QKV_PROJ, 2, Field.K, 32),
        Check.PAGES,
        Opcode.QKV_PROJ,
        "K is 96 and should be 64: so the qkv weights lie",
    ),
    "an input of more elements": (
        shift(Opcode.QKV_PROJ, 2, Field.K, 32),
        Check.PAGES,
        Opcode.QKV_PROJ,
        "K is 96 and should be 64: the input has so many elements a row",
    ),
    "weights in more pages": (
        shift(Opcode.QKV_PROJ, 2, Field.PAGES_PER_TILE, 1),
        Check.PAGES,
        Opcode.QKV_PROJ,
        "PAGES_PER_TILE is 2 and should be 1: so the qkv weights lie",
    ),
    "weights in smaller pages": (
        shift(Opcode.QKV_PROJ, 2, Field.PAGE_BYTES, -512),
        Check.PAGES,
        Opcode.QKV_PROJ,
        "PAGE_BYTES is 512 and should be 1024: so the qkv weights lie",
    ),
    "a loader that brings less than is consumed": (
        shift(Opcode.FFN_DOWN, 0, Field.PAGE_BYTES, -512),
        Check.PAGES,
        Opcode.FFN_DOWN,
        "the loader brings 1024 bytes a tile and the consumers take 1536",
    ),
    "a loader that brings more pages than are consumed": (
        shift(Opcode.O_PROJ, 2, Field.PAGES_PER_TILE, 1),
        Check.PAGES,
        Opcode.O_PROJ,
        "the loader brings",
    ),
    "a page that ends within a block": (
        shift(Opcode.LM_HEAD, None, Field.PAGE_BYTES, 256),
        Check.PAGES,
        Opcode.LM_HEAD,
        "ends within a block",
    ),
    "experts too close together": (
        shift(Opcode.EXPERT_DOWN, 2, Field.EXPERT_STRIDE, -1),
        Check.PAGES,
        Opcode.EXPERT_DOWN,
        "EXPERT_STRIDE",
    ),
    "keys of another size": (
        shift(Opcode.ATTENTION, 2, Field.PAGE_BYTES, -512),
        Check.PAGES,
        Opcode.ATTENTION,
        "the keys, or values",
    ),
    "weights that the layer does not have": (
        assign(Opcode.O_PROJ, 2, opcode=int(Opcode.FFN_DOWN), input=int(Buffer.HIDDEN)),
        Check.PAGES,
        Opcode.FFN_DOWN,
        "the layer has no such weights",
    ),
    # settings
    "another window": (
        assign(Opcode.ATTENTION_MERGE, 2, window=64),
        Check.SETTINGS,
        Opcode.ATTENTION_MERGE,
        "WINDOW is 64 and should be 128",
    ),
    "positions where there are none": (
        assign(Opcode.QKV_PROJ, 4, rope=1),
        Check.SETTINGS,
        Opcode.QKV_PROJ,
        "ROPE is 1 and should be 0",
    ),
    "another layer's norm": (
        assign(Opcode.ROUTER, 2, norm=1),
        Check.SETTINGS,
        Opcode.ROUTER,
        "NORM is 1 and should be 2",
    ),
    "another last norm": (
        assign(Opcode.LM_HEAD, None, norm=0),
        Check.SETTINGS,
        Opcode.LM_HEAD,
        "NORM is 0 and should be 5",
    ),
    "too many experts": (
        assign(Opcode.EXPERT_UP, 2, top_k=3),
        Check.SETTINGS,
        Opcode.EXPERT_UP,
        "TOP_K is 3 and should be 2",
    ),
    "weights that are normalised": (
        assign(Opcode.EXPERT_DOWN, 2, flags=int(Flag.NORMALIZE)),
        Check.SETTINGS,
        Opcode.EXPERT_DOWN,
        "FLAGS is 1 and should be 0",
    ),
    # order
    "a wait that can never be met": (
        shift(Opcode.O_PROJ, 2, Field.WAIT_ARRIVALS, 1),
        Check.UNREACHABLE,
        Opcode.O_PROJ,
        r"waits for counter merge\[2\], which has 16 of 17",
    ),
    "tasks that wait for one another": (
        swap(Opcode.ATTENTION_MERGE, Opcode.O_PROJ, 2),
        Check.CYCLE,
        Opcode.O_PROJ,
        r"merge\[2\], which has 12 of 16",
    ),
    "a loader that waits for the end of its own step": (
        assign(Opcode.ATTENTION, 0, one=False, loader_lag=0),
        Check.CYCLE,
        Opcode.ATTENTION,
        "counter commit",
    ),
    "activations of the layer before the last": (
        assign(Opcode.QKV_PROJ, 3, wait_counter=counter("down[1]")),
        Check.EARLY_READ,
        Opcode.QKV_PROJ,
        "reads X",
    ),
    "partial results of the layer before": (
        assign(Opcode.ATTENTION_MERGE, 2, one=False, wait_counter=counter("attention[1]")),
        Check.EARLY_READ,
        Opcode.ATTENTION_MERGE,
        "reads PARTIALS, not knowing that ATTENTION of layer 2 has written it",
    ),
    "experts that are chosen by old logits": (
        assign(Opcode.EXPERT_UP, 2, one=False, loader_counter=0, loader_arrivals=0),
        Check.EARLY_READ,
        Opcode.EXPERT_UP,
        "reads ROUTER_LOGITS",
    ),
    "rows that the step before may still change": (
        assign(Opcode.ATTENTION, 0, one=False, loader_counter=0, loader_arrivals=0),
        Check.EARLY_READ,
        Opcode.ATTENTION,
        "reads ROW_STATE",
    ),
    "experts of rows that the step before may still change": (
        loaders_unwaited,
        Check.EARLY_READ,
        Opcode.EXPERT_UP,
        "reads ROW_STATE",
    ),
    "hidden activations that are not there yet": (
        unwaited(Opcode.O_PROJ, Opcode.EXPERT_DOWN, layer=2),
        Check.EARLY_READ,
        Opcode.EXPERT_DOWN,
        "reads HIDDEN",
    ),
    "attention that is not there yet": (
        unwaited(Opcode.O_PROJ, layer=2),
        Check.EARLY_READ,
        Opcode.O_PROJ,
        "reads ATTENTION_OUT",
    ),
    "activations overwritten in the middle of a layer": (
        unwaited(Opcode.O_PROJ, Opcode.EXPERT_DOWN, layer=2),
        Check.OVERWRITE,
        Opcode.EXPERT_DOWN,
        "writes X while SM .'s consumers may still use",
    ),
    "activations overwritten by the next step": (
        unwaited(*SAMPLING),
        Check.OVERWRITE,
        Opcode.EMBED,
        "writes X while",
    ),
    "sums cleared while they are looked at": (
        unwaited(Opcode.SAMPLE_PICK, Opcode.SAMPLE_COMMIT),
        Check.OVERWRITE,
        Opcode.SAMPLE_COMMIT,
        r"writes HISTOGRAM\[.\] while",
    ),
    "publishing without a signal": (
        assign(Opcode.O_PROJ, 2, output=int(Buffer.X)),
        Check.TARGETS,
        Opcode.O_PROJ,
        "must signal if it writes X",
    ),
    "candidates that are not there yet": (
        assign(Opcode.SAMPLE_COMMIT, None, one=False, wait_counter=counter("stats")),
        Check.EARLY_READ,
        Opcode.SAMPLE_COMMIT,
        "reads CANDIDATES",
    ),
    "a threshold that is looked for too early": (
        assign(Opcode.SAMPLE_SELECT, None, one=False, wait_counter=counter("stats")),
        Check.EARLY_READ,
        Opcode.SAMPLE_SELECT,
        r"reads HISTOGRAM\[0\]",
    ),
}


@pytest.mark.parametrize(("change", "kind", "opcode", "message"), ONE_FAULT.values(), ids=ONE_FAULT.keys())
def test_a_broken_plan_is_called_broken(
    change: Callable[[Words], None], kind: Check, opcode: Opcode | None, message: str
) -> None:
    faults = broken(change)
    named = [fault for fault in faults if fault.check is kind and fault.opcode is opcode]
    assert any(re.search(message, fault.message) for fault in named), "\n".join(map(str, faults))
    # Whoever reads it can find the place: all but faults of a whole list name a task of this layer and an SM.
    assert all(
        fault.sm is not None
        for fault in named
        if "nobody" not in fault.message and "SMs are" not in fault.message
    )


def test_a_fault_says_what_is_wrong_and_where() -> None:
    assert [str(fault) for fault in broken(assign(Opcode.QKV_PROJ, 2, rope=3))] == [
        "fields: QKV_PROJ, layer 2, SM 0: ROPE (a Pairing) is 3, and must be 0 to 2"
    ]
    (stuck,) = (
        fault
        for fault in broken(shift(Opcode.O_PROJ, 2, Field.WAIT_ARRIVALS, 1))
        if fault.check is Check.UNREACHABLE
    )
    assert str(stuck) == (
        "unreachable: O_PROJ, layer 2, SM 0: waits for counter merge[2], which has 16 of 17, "
        "and a step does not add that much"
    )


def test_a_plan_is_not_walked_through_to_its_end_once_enough_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = broken(loaders_unwaited)
    monkeypatch.setattr(order, "MOST_FAULTS", 1)
    few = broken(loaders_unwaited)
    assert few == every[: len(few)]
    assert 0 < len(few) < len(every)


def test_keys_under_the_wrong_counter_are_found() -> None:
    """The heads' counters exchanged: each is reached, with the right arrivals, by the wrong tasks."""

    def change(words: Words) -> None:
        sms, tasks = where(words, Opcode.QKV_PROJ, 2)
        heads = words[sms, tasks, Field.KV_HEAD]
        words[sms, tasks, Field.SIGNAL_COUNTER] = counter("qkv[2][0]") + 1 - heads

    faults = broken(change)
    early = [fault for fault in faults if fault.check is Check.EARLY_READ]
    assert {(fault.opcode, fault.layer) for fault in early} == {(Opcode.ATTENTION, 2)}
    assert any("reads QKV[0]" in fault.message for fault in early)


@pytest.mark.parametrize("ends", [True, False])
def test_pairs_of_rows_stay_on_one_sm(ends: bool) -> None:
    """The first SM ends within a pair, or the second begins within one."""

    def change(words: Words) -> None:
        sms, tasks = where(words, Opcode.QKV_PROJ, 1)
        if not ends:
            words[sms[1], tasks[1], Field.FIRST_TILE] += 1
        words[sms[0 if ends else 1], tasks[0 if ends else 1], Field.TILE_COUNT] -= 1

    faults = [fault for fault in broken(change, LLAMA) if "half-split pairs" in fault.message]
    assert [(fault.opcode, fault.layer, fault.sm) for fault in faults] == [
        (Opcode.QKV_PROJ, 1, 0 if ends else 1)
    ]


def test_of_a_tile_that_is_made_twice_an_sm_is_named_that_makes_it() -> None:
    def change(words: Words) -> None:
        sms, tasks = where(words, Opcode.O_PROJ, 2)
        words[sms[-1], tasks[-1], Field.FIRST_TILE] -= 1

    (fault,) = (fault for fault in broken(change) if "is made 2 times" in fault.message)
    assert (fault.message, fault.sm) == ("tile 5 is made 2 times", SMS - 2)


def test_shared_experts_are_made_as_dense_layers_are() -> None:
    mlp = MoEMLP(width=32, experts=6, top_k=2, shared_experts=1)
    plan = build_plan(replace(TINY, layers=(replace(TINY.layers[0], mlp=mlp),)), rows=1, sms=3)
    assert check(plan) == []
    for opcode, words in ((Opcode.FFN_UP, "of 4"), (Opcode.FFN_DOWN, "of 8")):
        faults = broken(drop(opcode), plan)
        missing = [fault.message for fault in faults if fault.opcode is opcode]
        assert f"nobody makes tile 0 {words}" in missing


def test_a_sequential_block_must_publish_twice() -> None:
    faults = broken(assign(Opcode.O_PROJ, 1, one=False, output=int(Buffer.RESIDUAL)), LLAMA)
    assert [(fault.check, fault.opcode, fault.layer, fault.sm) for fault in faults] == [
        (Check.TARGETS, Opcode.O_PROJ, 1, 0)
    ]


def test_keys_of_the_step_before_are_waited_for() -> None:
    """Without a router in between, nothing but its own wait tells the loader that the step before is over."""
    none = {"loader_counter": 0, "loader_arrivals": 0, "loader_lag": 0}
    faults = broken(assign(Opcode.ATTENTION, None, one=False, **none), LLAMA)
    assert {(fault.check, fault.opcode) for fault in faults} == {(Check.EARLY_READ, Opcode.ATTENTION)}
    assert {fault.message for fault in faults} == {
        "reads ROW_STATE before the step before has committed it",
        "reads KV_PAGES that the step before may still write",
    }
