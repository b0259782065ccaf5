"""The instruction set: every word has one meaning, and the header says the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.model.config import Rope
from headrace.model.presets import NORTH_MINI_CODE
from headrace.model.sampling import MAX_LOGPROBS
from headrace.step import isa, operations
from headrace.step.isa import FIELDS, SAMPLING, USED, WORDS, Field, Opcode, Pairing, Round
from headrace.step.isa_header import isa_header, sizes_header
from headrace.step.planner import build_plan
from tests.step.configs import TINY

HEADER = Path(isa.__file__).parent.parent / "kernel" / "include" / "isa.h"
COMPILER = shutil.which("g++") or shutil.which("clang++")


def test_every_word_and_operation_is_described() -> None:
    assert [field.value for field in Field] == list(range(WORDS))
    assert set(FIELDS) == set(Field)
    assert set(USED) == set(Opcode)
    for opcode, fields in USED.items():
        assert len(set(fields)) == len(fields), opcode
        assert Field.OPCODE not in fields, opcode
    for field, info in FIELDS.items():
        assert -(2**31) <= info.low <= info.high < 2**31, field
    in_use = {field for fields in USED.values() for field in fields}
    assert in_use == set(Field) - {Field.OPCODE}


def test_every_operation_is_explained() -> None:
    explained = re.findall(r"^([A-Z_]+)(?:  \[.*\])?$", operations.__doc__ or "", re.MULTILINE)
    assert explained == [opcode.name for opcode in Opcode if opcode is not Opcode.END]


def test_fields_come_with_what_they_belong_to() -> None:
    for opcode, fields in USED.items():
        for counter in (field for field in fields if field.name.endswith("_COUNTER")):
            amount = "SIGNAL_AMOUNT" if counter is Field.SIGNAL_COUNTER else f"{counter.name[:-8]}_ARRIVALS"
            assert Field[amount] in fields, (opcode, counter)
        assert (Field.SHARE in fields) == (opcode in isa.DYNAMIC | SAMPLING)


def test_numbers_that_others_define_agree() -> None:
    assert [pairing.name for pairing in Pairing] == [rope.name for rope in Rope]
    assert isa.TOP_LOGPROBS == MAX_LOGPROBS
    assert isa.DIGIT_BITS * isa.DIGITS == 32
    assert len(Round) == 2 * (isa.DIGITS + 1)
    assert max(isa.ROW_CAPACITIES) == isa.MAX_ROWS


def test_the_checked_in_header_is_not_stale() -> None:
    assert HEADER.read_text(encoding="utf-8") == isa_header(), "run: python -m tools.generate_isa"


def test_a_stale_header_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "MAX_CHUNKS", 65)
    assert HEADER.read_text(encoding="utf-8") != isa_header()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_the_headers_compile_and_their_assertions_hold(tmp_path: Path) -> None:
    plan = build_plan(NORTH_MINI_CODE, rows=16, sms=132)
    (tmp_path / "sizes.h").write_text(sizes_header(plan))
    source = tmp_path / "use.cpp"
    source.write_text(
        '#include "isa.h"\n#include "sizes.h"\n'
        f"static_assert(offsetof(isa::Descriptor, kv_head) == {4 * Field.KV_HEAD});\n"
        "static_assert(static_cast<int>(isa::Opcode::SAMPLE_COMMIT) == 15);\n"
        "static_assert(sizes::ROWS * sizes::SMS == 2112 && sizes::HEAD_DIM == 128);\n"
        "static_assert(sizes::BUFFER_BYTES > sizes::CANDIDATES_OFFSET);\n"
        "static_assert(sizes::NORM_EPS > 0.9e-6f && sizes::NORM_EPS < 1.1e-6f);\n"
    )
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
    subprocess.run([*command, "-I", HEADER.parent, "-I", tmp_path, source], check=True, capture_output=True)


def test_buffers_of_a_plan_do_not_overlap() -> None:
    from headrace.step.buffers import arena, buffer_specs

    specs = buffer_specs(build_plan(TINY, rows=4, sms=3).sizes)
    offsets, total = arena(specs)
    end = 0
    for buffer, offset in sorted(offsets.items(), key=lambda item: item[1]):
        assert offset >= end
        assert offset % 128 == 0  # bulk copies want 16, and counters' neighbours a line of their own
        end = offset + specs[buffer].bytes
    assert end <= total
