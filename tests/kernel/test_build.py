"""The kernel compiles without a GPU, into code that uses no local memory; and its cache cannot be stale."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kernel import build as building
from headrace.kernel.build import (
    BuildError,
    Resources,
    build,
    build_all,
    build_source,
    cache_key,
    compile_source,
    has_compiler,
    resources_of,
)
from headrace.kernel.variant import Variant, VariantError, variant_of
from headrace.model.config import MoEMLP
from headrace.model.presets import PRESETS
from headrace.step.checker import check
from headrace.step.isa import Field, Opcode
from headrace.step.planner import build_plan
from tests.waiting import WAIT

ENTRY_REGISTERS = 168  # of a thread, before setmaxnreg: 65,536 shared by 384 threads

# The largest tiles and the most rows, by the book and not. The others take minutes: HEADRACE_ALL_KERNELS=1.
COVERING = [("north-micro-shape", 1, False), ("north-mini-code", 16, True)]
REST = [
    (name, rows, strict)
    for name in ("north-mini-code", "north-micro-shape")
    for rows in (1, 2, 4, 8, 16)
    for strict in (False, True)
    if (name, rows, strict) not in COVERING
]
VARIANTS = COVERING + (REST if os.environ.get("HEADRACE_ALL_KERNELS") else [])


def variant(name: str, rows: int, *, strict: bool = False) -> Variant:
    return variant_of(build_plan(PRESETS[name], rows=rows, sms=132), strict=strict)


@pytest.mark.parametrize(("name", "rows", "strict"), VARIANTS)
def test_every_variant_compiles_without_local_memory(
    name: str, rows: int, strict: bool, tmp_path: Path
) -> None:
    lines: list[str] = []
    binary = build(variant(name, rows, strict=strict), cache=tmp_path, progress=lines.append)
    assert len(lines) == 1
    assert binary.cubin.startswith(b"\x7fELF")
    binary.resources.check()
    assert binary.resources.registers <= ENTRY_REGISTERS
    assert "setmaxnreg ignored" not in binary.log
    again = build(variant(name, rows, strict=strict), cache=tmp_path, progress=lines.append)
    assert (again.cubin, again.log, again.seconds) == (binary.cubin, binary.log, 0.0)
    assert len(lines) == 1


def test_several_are_compiled_side_by_side_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compilation waits until both have begun: one after the other would never end."""
    both = threading.Barrier(2, timeout=WAIT)

    def compile_slowly(source: str, headers: dict[str, str]) -> tuple[bytes, str]:
        both.wait()
        return headers["sizes.h"].encode(), "log"

    monkeypatch.setattr(building, "compile_source", compile_slowly)
    variants = [variant("north-micro-shape", rows) for rows in (1, 2)]
    lines: list[str] = []
    binaries = build_all(variants, cache=tmp_path, progress=lines.append)
    assert [binary.cubin.decode() for binary in binaries] == [one.headers["sizes.h"] for one in variants]
    assert len(lines) == 1
    assert [binary.seconds for binary in build_all(variants, cache=tmp_path, progress=lines.append)] == [0, 0]
    assert len(lines) == 1


def test_any_source_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of prompts are, and a changed one is compiled again."""
    compiled: list[str] = []

    def compile_at_once(source: str, headers: dict[str, str]) -> tuple[bytes, str]:
        compiled.append(source)
        return source.encode(), "log"

    monkeypatch.setattr(building, "compile_source", compile_at_once)
    cubins = [build_source(source, {}, cache=tmp_path).cubin for source in ("a", "b", "a", "b")]
    assert cubins == [b"a", b"b", b"a", b"b"]
    assert compiled == ["a", "b"]


def test_what_does_not_compile_is_told_in_the_compilers_words() -> None:
    with pytest.raises(BuildError, match=r'the kernel does not compile:(.|\n)*"nothing" is undefined'):
        compile_source('extern "C" __global__ void decode() { nothing; }', {})


def test_local_memory_is_seen() -> None:
    """A kernel that indexes an array by data, which the assembler can only put into local memory."""
    source = """
extern "C" __global__ void decode(int* out, const int* in) {
  int held[64];
  for (int i = 0; i < 64; i++) held[in[i] & 63] = in[i + 64];
  out[threadIdx.x] = held[threadIdx.x & 63];
}
"""
    _, log = compile_source(source, {})
    with pytest.raises(BuildError, match="local memory"):
        resources_of(log).check()


def test_spills_are_seen() -> None:
    log = "ptxas . 0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nUsed 168 registers"
    resources = resources_of(log)
    assert resources == Resources(168, 0, 8, 4)
    with pytest.raises(BuildError, match="8 bytes of spill stores"):
        resources.check()
    with pytest.raises(BuildError, match="no resource report"):
        resources_of("nothing of use")


def test_headers_come_from_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the folder that the server is started in, though a header of the same name is there."""
    source = '#include "thing.h"\n extern "C" __global__ void decode(int* out) { *out = THING; }'
    (tmp_path / "thing.h").write_text("#error the wrong one")
    monkeypatch.chdir(tmp_path)
    compile_source(source, {"thing.h": "#define THING 1"})
    with pytest.raises(BuildError, match=r"thing\.h"):
        compile_source(source, {})
    monkeypatch.setitem(building.OPTIONS, "no_source_include", False)
    with pytest.raises(BuildError, match="the wrong one"):
        compile_source(source, {"thing.h": "#define THING 1"})


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings.nvrtc"])
def test_a_missing_compiler_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_compiler()
    for name in [name for name in sys.modules if name.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert not has_compiler()


def test_the_key_covers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"a.h": "1", "b.h": "2"}
    key = cache_key(headers, "nvrtc 13.0")
    assert key == cache_key(dict(reversed(headers.items())), "nvrtc 13.0")
    assert key != cache_key({"a.h": "12", "b.h": ""}, "nvrtc 13.0")
    assert key != cache_key({"a.h": "1", "c.h": "2"}, "nvrtc 13.0")
    assert key != cache_key(headers, "nvrtc 13.1")
    assert key != cache_key(headers, "nvrtc 13.0", "other source")
    monkeypatch.setitem(building.OPTIONS, "debug", True)
    assert key != cache_key(headers, "nvrtc 13.0")


def test_strict_and_row_capacity_are_different_kernels() -> None:
    keys = {
        cache_key(variant("north-micro-shape", rows, strict=strict).headers, "")
        for rows in (1, 2)
        for strict in (False, True)
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 16, "num_kv_heads": 16}, "up to 8 KV heads, not 16: decode with"),
        ({"num_kv_heads": 1}, "up to 8 query heads a KV head .* not 9 and 64: decode with"),
        ({"num_heads": 8, "num_kv_heads": 8, "head_dim": 48}, "not 1 and 48: decode with"),
    ],
)
def test_models_that_the_kernel_has_no_operations_for_are_refused(
    changes: dict[str, object], words: str
) -> None:
    config = replace(PRESETS["smollm2-135m"], **changes)  # type: ignore[arg-type]
    with pytest.raises(VariantError, match=words):
        variant_of(build_plan(config, rows=1, sms=132))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 8}, r"one number of experts, not \[8, 16\]: decode with"),
        ({"top_k": 2}, r"one number of a row's experts, not \[2, 4\]: decode with"),
    ],
)
def test_layers_that_route_in_different_ways_are_refused(changes: dict[str, int], words: str) -> None:
    """The last layer has fewer experts than the others, or fewer for a row."""
    micro = PRESETS["north-micro-shape"]
    mlp = micro.layers[-1].mlp
    assert isinstance(mlp, MoEMLP)
    last = replace(micro.layers[-1], mlp=replace(mlp, **changes))  # type: ignore[arg-type]
    plan = build_plan(replace(micro, layers=(*micro.layers[:-1], last)), rows=1, sms=132)
    assert check(plan) == [], "it is the kernel that cannot"
    with pytest.raises(VariantError, match=words):
        variant_of(plan)


def test_shares_for_fewer_sms_than_there_are_are_refused() -> None:
    """The kernel divides by the number of SMs, which it knows when it is compiled."""
    plan = build_plan(PRESETS["north-micro-shape"], rows=1, sms=132)
    words = plan.descriptors.copy()
    words[words[..., Field.OPCODE] == Opcode.ATTENTION, Field.SHARES] = 131
    with pytest.raises(VariantError, match="a share for each SM, 132 of them"):
        variant_of(replace(plan, descriptors=words))


THREADS = """
import threading
from dataclasses import replace
from headrace.kernel import build
start, found = threading.Barrier(8), []
def look():
    start.wait()
    found.append(hasattr(build._cuda_core(), "ProgramOptions"))
threads = [threading.Thread(target=look) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [True] * 8, found
"""


def test_threads_that_compile_first_find_cuda_core_whole() -> None:
    """In a process of its own: here somebody may have imported it long ago."""
    subprocess.run([sys.executable, "-c", THREADS], check=True)
