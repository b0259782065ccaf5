"""Descriptors as lines."""

from __future__ import annotations

import numpy as np

from headrace.step.isa import WORDS, Buffer, Field, Flag, Opcode
from headrace.step.plan import Words
from headrace.step.planner import build_plan
from headrace.step.text import describe, listing
from tests.step.configs import TINY

COUNTERS = ("none", "down[2]", "qkv[3][1]", "commit", "router[3]")


def words(**values: int) -> Words:
    out = np.zeros(WORDS, dtype=np.int32)
    for name, value in values.items():
        out[Field[name.upper()]] = value
    return out


def test_a_projection() -> None:
    task = words(
        opcode=Opcode.QKV_PROJ, layer=3, first_tile=200, tile_count=5, k=2048, pages_per_tile=2,
        page_bytes=16384, in_flight=1, weights=81920, norm=3, input=Buffer.X, output=Buffer.QKV,
        wait_counter=1, wait_arrivals=256, signal_counter=2, signal_amount=5, kv_head=1, rope=1, window=4096,
    )  # fmt: skip
    assert describe(task, COUNTERS) == (
        "QKV_PROJ layer=3 tiles=200..204 head=1 k=2048 pages=2x16384 @81920 in_flight=1 norm=3 "
        "window=4096 rope=INTERLEAVED X -> QKV wait down[2]=256 signal qkv[3][1]+5"
    )


def test_shares_spans_and_the_step_before() -> None:
    task = words(
        opcode=Opcode.ATTENTION, layer=3, share=7, shares=132, input=Buffer.QKV, output=Buffer.PARTIALS,
        wait_counter=2, wait_arrivals=160, wait_span=4, loader_counter=3, loader_arrivals=132, loader_lag=1,
        signal_counter=4, signal_amount=1, page_bytes=16384, in_flight=3, window=0,
    )  # fmt: skip
    assert describe(task, COUNTERS) == (
        "ATTENTION layer=3 share=7/132 pages=x16384 in_flight=3 window=0 QKV -> PARTIALS "
        "wait qkv[3][1]=160 (x4) loader commit=132 of the step before signal router[3]+1"
    )


def test_flags_and_no_tiles() -> None:
    task = words(
        opcode=Opcode.SAMPLE_PICK, share=0, shares=2, input=Buffer.LOGITS, output=Buffer.CANDIDATES,
        flags=Flag.WRITER, signal_counter=3, signal_amount=1,
    )  # fmt: skip
    assert describe(task, COUNTERS) == (
        "SAMPLE_PICK tiles=none share=0/2 flags=WRITER LOGITS -> CANDIDATES signal commit+1"
    )


def test_a_list_in_full_and_of_one_layer() -> None:
    plan = build_plan(TINY, rows=1, sms=3)
    lines = list(listing(plan, 1))
    assert len(lines) == plan.lengths[1]
    assert lines[0].split()[:2] == ["0", "EMBED"]
    assert lines[-1].split()[1] == "SAMPLE_COMMIT"
    some = list(listing(plan, 1, layer=2))
    assert some == [line for line in lines if " layer=2 " in line]
    assert len(some) == 7
