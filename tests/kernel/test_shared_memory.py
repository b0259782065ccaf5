"""The account of shared memory against the kernel's structure, compiled for the host by a C++ compiler."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kernel.build import fixed_headers
from headrace.kernel.variant import variant_of
from headrace.model.config import ModelConfig
from headrace.model.presets import LLAMA_3_2_1B, NORTH_MINI_CODE, SMOLLM2_135M
from headrace.step.isa import Field, Opcode
from headrace.step.oracle.world import north
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from headrace.step.shared_memory import shared_bytes
from tests.kernel.emulated import COMMON, COMPILER, HERE, compile_at
from tests.kernel.extremes import MANY
from tests.kernel.llamas import LLAMA_8B

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SOURCE = """
#include "alignment.h"
#include "cuda.h"
#include "state.h"
uint8_t* shared_begin() { return nullptr; }
size_t shared_size() { return 0; }
extern "C" __attribute__((visibility("default"))) size_t bytes() { return sizeof(Shared); }
"""
DENSE = replace(north(), layers=north().layers[:1])
SLACK = 1024  # bytes by which the account may be above the kernel


def taken(plan: Plan, folder: Path, *, trace: bool) -> int:
    headers = {**fixed_headers(), **variant_of(plan, trace=trace).headers}
    headers |= {name: (HERE / name).read_text() for name in COMMON} | {"size.cpp": SOURCE}
    compile_at(folder, "size.cpp", headers)
    return int(ctypes.CDLL(str(folder / "launch.so")).bytes())


def account(plan: Plan) -> int:
    words = plan.descriptors
    owned = words[:, :, Field.TILE_COUNT][words[:, :, Field.OPCODE] == Opcode.EMBED]
    return shared_bytes(plan.machine, plan.sizes, int(owned.max()))


@pytest.mark.parametrize(
    ("config", "rows", "sms"),
    [(NORTH_MINI_CODE, rows, 132) for rows in (1, 2, 4, 8, 16)]
    + [(NORTH_MINI_CODE, 16, 78), (north(MANY), 16, 3), (north(), 4, 3), (DENSE, 8, 114)]
    + [(SMOLLM2_135M, 1, 132), (LLAMA_3_2_1B, 4, 132), (LLAMA_8B, 16, 132)],
)
def test_the_account_covers_what_the_kernel_takes_and_little_more(
    config: ModelConfig, rows: int, sms: int, tmp_path: Path
) -> None:
    plan = build_plan(config, rows=rows, sms=sms)
    assert 0 <= account(plan) - taken(plan, tmp_path, trace=True) <= SLACK


def test_a_member_that_is_not_in_the_account_is_seen(tmp_path: Path) -> None:
    """The structure of 16 rows against the account of 8."""
    plan = build_plan(NORTH_MINI_CODE, rows=16, sms=132)
    narrow = replace(plan, sizes=replace(plan.sizes, rows=8))
    assert account(narrow) - taken(plan, tmp_path, trace=False) < 0
