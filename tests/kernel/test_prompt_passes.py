"""The fused steps of prompts against their plain twins, bit by bit: compiled as C++ here, or on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernel.build import compile_source, resources_of
from headrace.kernel.prompt.passes import _MOST_PARTS, KERNELS, SOURCE, Passes, _passed, available, fits
from headrace.model import cohere2_moe
from headrace.model.config import DenseMLP, KVGroup, MoEMLP, Rope
from headrace.model.kv import BLOCK_TOKENS, KVCache
from headrace.model.layers import group, route, spread, swiglu, weighed_sum
from headrace.model.presets import NORTH_MICRO_SHAPE, PRESETS, north_layers
from headrace.model.rope import Rotation, rotate
from headrace.model.synthetic import synthetic_model
from headrace.model.tiled import join
from headrace.model.varlen import read_blocks
from headrace.step.pack import pack_model

HOST = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __shared__
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
static struct { unsigned x, y, z; } blockIdx, threadIdx, blockDim, gridDim;
static float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float4 __ldcs(const float4* from) { return *from; }
static void __stcs(float4* to, float4 value) { *to = value; }
static float __fdividef(float a, float b) { return a / b; }
static void __syncthreads() {}
#include "passes.cu"
Eight tile[64 * 40];
template <typename... A>
static void run(void (*kernel)(A...), unsigned gx, unsigned gy, unsigned threads, A... a) {
  gridDim = {gx, gy, 1};
  blockDim = {threads, 1, 1};
  for (blockIdx.x = 0; blockIdx.x < gx; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < gy; ++blockIdx.y)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(a...);
}
template <typename... A, std::size_t... I>
static void unfold(void (*kernel)(A...), unsigned gx, unsigned gy, unsigned threads, void** values,
                   std::index_sequence<I...>) {
  run<A...>(kernel, gx, gy, threads, *static_cast<std::decay_t<A>*>(values[I])...);
}
template <typename... A>
static void call(void (*kernel)(A...), unsigned gx, unsigned gy, unsigned threads, void** v) {
  unfold(kernel, gx, gy, threads, v, std::index_sequence_for<A...>{});
}
"""


class OnHost(Passes):
    """The same launches, their kernels compiled for the CPU and run thread after thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _launch(
        self, name: str, grid: tuple[int, int], threads: int, *arguments: Any, shared: int = 0
    ) -> None:
        if shared:  # a barrier: one thread does all, in order
            threads = 1
        values = [np.asarray(_passed(argument)) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        getattr(self._library, f"host_{name}")(*grid, threads, pointers)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Passes:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return build_host(compiler, tmp_path_factory.mktemp("host"), SOURCE.read_text())


def build_host(compiler: str, folder: Path, source: str) -> Passes:
    (folder / "passes.cu").write_text(source)
    calls = "\n".join(
        f'extern "C" void host_{name}(unsigned gx, unsigned gy, unsigned threads, void** values) '
        f"{{ call({name}, gx, gy, threads, values); }}"
        for name in KERNELS
    )
    (folder / "host.cpp").write_text("#include <utility>\n#include <type_traits>\n" + HOST + calls)
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    subprocess.run([*command, "host.cpp", "-o", "host.so"], cwd=folder, check=True)
    return OnHost(ctypes.CDLL(str(folder / "host.so")))


@dataclass
class Bench:
    """Where the steps run, and what they are compared with."""

    passes: Passes
    device: str

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape).bfloat16().to(self.device)

    def check_swiglu(self) -> None:
        gate_up = self.random(37, 2 * 24) * 4
        made, right = self.passes.swiglu(gate_up), swiglu(gate_up)
        # The exponential may differ in its last bit from PyTorch's, and a rounding then by one step.
        assert (made.view(torch.int16) - right.view(torch.int16)).abs().max() <= 1
        assert (made != right).float().mean() < 0.01

    def check_add(self) -> None:
        x, y, z = (self.random(37, 24) * scale for scale in (1, 0.01, 3))
        assert torch.equal(self.passes.add(x, y, z), x + y + z)
        with pytest.raises(ValueError, match="cannot be added"):
            self.passes.add(x, y, z[:1])

    def check_combine(self) -> None:
        parts, weights = self.random(40, 64), torch.rand(10, 4, device=self.device)
        places = torch.randperm(40).int().view(10, 4).to(self.device)
        right = weighed_sum(parts, places, weights).bfloat16()
        assert torch.equal(self.passes.combine(parts, places, weights), right)

    def check_rotate(self) -> None:
        x, angles = self.random(19, 3, 64), torch.randn(19, 32, device=self.device)
        by = Rotation(angles.cos(), angles.sin())
        assert torch.equal(self.passes.rotate(x, by), rotate(x, Rope.INTERLEAVED, by))

    def check_write_blocks(self) -> None:
        for head_dim in (32, 64, 128):
            config = replace(NORTH_MICRO_SHAPE, num_kv_heads=2, head_dim=head_dim)
            ours, theirs = (
                KVCache(config, dict.fromkeys(KVGroup, 6), dtype=torch.bfloat16, device=self.device)
                for _ in range(2)
            )
            ours.fused = self.passes
            blocks = torch.tensor([4, 1, 3], device=self.device)
            k, v = (self.random(3 * BLOCK_TOKENS, 2, head_dim) for _ in "kv")
            for cache in (ours, theirs):
                cache.write_blocks(2, blocks, k, v)
            assert torch.equal(ours.pages[2], theirs.pages[2])
            assert (ours.pages[2] != 0).any()

    def check_read_blocks(self) -> None:
        for head_dim in (32, 64, 128):
            pages = self.random(6, 2, 2, BLOCK_TOKENS * head_dim)
            blocks, rows, counts = (
                torch.tensor(column, device=self.device)
                for column in ([4, 1, 3, 1], [3, 70, 140, 0], [64, 64, 5, 1])
            )
            ours, theirs = (torch.zeros(2, 150, 2, head_dim).bfloat16().to(self.device) for _ in "ab")
            self.passes.read_blocks(pages, blocks, rows, counts, *ours)
            read_blocks(pages, blocks, rows, counts, *theirs)
            assert torch.equal(ours, theirs)
            assert (theirs[:, 3:67] != 0).any()
            assert not theirs[:, 1:3].any()
            assert not theirs[:, 145:].any()

    def check_join(self) -> None:
        """Of a few parts, and of as many as there can be."""
        self._check_join([40, 40, 39, 40], [False, False, True, False])
        self._check_join([40] * (_MOST_PARTS - 1) + [39], [False] * (_MOST_PARTS - 1) + [True])

    def _check_join(self, counts: list[int], turned: list[bool]) -> None:
        values = [self.random(count, 40, 64) for count in counts]  # more than a block has threads
        sums = [torch.randn(40, count, device=self.device) * 3 + 100 for count in counts]
        ours, theirs = (self.random(40, 40, 64) for _ in "ab")
        self.passes.join(values, sums, turned, ours)
        join(values, sums, turned, theirs)
        first = values[0].clone()  # which may be what is filled
        self.passes.join([first, *values[1:]], sums, turned, first)
        assert torch.equal(first, ours)
        # As with swiglu; where parts cancel, more steps, but of a small number.
        assert ((ours - theirs).abs() <= 2**-7 * (theirs.abs() + 1)).all()
        assert (ours != theirs).float().mean() < 0.01

    def check_choose(self) -> None:
        """Ties, both zeros, infinities and what is no number included."""
        logits = torch.randint(-6, 7, (150, 24)).float() / 2
        logits[:40, 5] = -torch.inf
        logits[80:100] = -1.0
        logits[80:100, 3], logits[80:100, 4:12] = -0.0, 0.0
        logits[40:60, 7] = torch.inf
        logits[60:80, 20] = torch.nan
        logits[100:] = torch.randn(50, 24)
        logits = logits.to(self.device)
        mlp = MoEMLP(width=8, experts=24, top_k=5)
        ids, weights = self.passes.choose(logits, 5)
        right_ids, right = route(logits, mlp)
        assert torch.equal(ids, right_ids)
        assert torch.allclose(weights, right, rtol=1e-6, equal_nan=True)

    def check_group(self) -> None:
        for tokens in (1, 52, 300):
            ids = torch.rand(tokens, 12).argsort(dim=-1)[:, :5].sort(dim=-1).values.to(self.device)
            ids[ids == 3] = 2  # an expert that nobody uses, and one that some use twice
            for ours, theirs in zip(self.passes.group(ids, 12), group(ids, 12), strict=True):
                assert torch.equal(ours, theirs)

    def check_spread(self) -> None:
        x, places = self.random(10, 64), torch.randperm(40).int().view(10, 4).to(self.device)
        rows = self.passes.spread(x, places)
        assert torch.equal(rows, spread(x, places))
        assert torch.equal(rows[places[7, 2]], x[7])

    def check_unpack(self) -> None:
        """Experts' matrices, in fewer blocks than there is to do and in more."""
        routed = MoEMLP(width=96, experts=4, top_k=2)
        layers = north_layers(3, window=64, dense=DenseMLP(width=64), routed=routed)
        model = synthetic_model(
            replace(NORTH_MICRO_SHAPE, hidden_size=64, layers=layers), dtype=torch.bfloat16
        )
        packed = pack_model(model, device=self.device, dtype=torch.bfloat16)
        packed.fused = self.passes
        for blocks, threads in ((None, 256), (1, 256), (3, 1024)):
            self.passes.unpack_blocks, self.passes.unpack_threads = blocks, threads
            for name in ("gate_up", "down"):
                name = f"blocks.2.mlp.experts.{name}"
                right = model.get_parameter(name).to(self.device)
                out = torch.zeros_like(right)
                assert packed._experts(name, out) is not None
                packed.unpack(name, out)
                assert torch.equal(out, right)


CHECKS = (
    *("swiglu", "add", "combine", "rotate", "write_blocks", "read_blocks", "join"),
    *("choose", "group", "spread", "unpack"),
)


@pytest.mark.parametrize("check", CHECKS)
def test_steps_have_the_bits_of_their_twins(on_host: Passes, check: str) -> None:
    getattr(Bench(on_host, "cpu"), f"check_{check}")()


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_so_they_do_on_a_gpu(check: str) -> None:
    assert available(torch.device("cuda"))
    getattr(Bench(Passes(), "cuda"), f"check_{check}")()


@pytest.mark.gpu
def test_so_do_the_experts_of_a_whole_chunk() -> None:
    """At North's sizes, where many blocks run side by side; logits of 8 bits are often equal."""
    passes = Passes()
    logits = torch.randn(8192, 128, device="cuda").bfloat16().float()
    ids, _ = passes.choose(logits, 8)
    assert torch.equal(ids, route(logits, MoEMLP(width=8, experts=128, top_k=8))[0])
    places, ends = passes.group(ids, 128)
    right_places, right_ends = group(ids, 128)
    assert torch.equal(places, right_places)
    assert torch.equal(ends, right_ends)
    x = torch.randn(8192, 2048, device="cuda").bfloat16()
    assert torch.equal(passes.spread(x, places), spread(x, places))
    for paired, rows, columns in ((True, 1536, 2048), (False, 2048, 768)):
        stored = torch.randn(16, rows // 8, columns // 32, 8, 32, device="cuda").bfloat16()
        tiles = stored.transpose(2, 3).reshape(16, rows // 8, 8, columns)
        right = tiles.view(16, rows // 2, 2, columns).transpose(1, 2) if paired else tiles
        out = torch.empty(16, rows, columns, dtype=torch.bfloat16, device="cuda")
        passes.unpack(stored.flatten(), out, paired=paired)
        assert torch.equal(out, right.reshape(out.shape))


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        ("swiglu", "1.0f + expf(-x)", "1.0f + expf(x)"),
        (
            "add",
            "wide(narrow(__fadd_rn(wide(a.at[j]), wide(b.at[j]))))",
            "__fadd_rn(wide(a.at[j]), wide(b.at[j]))",
        ),
        ("combine", "rows[i]", "rows[top_k - 1 - i]"),
        ("rotate", "__fsub_rn(__fmul_rn(a", "__fadd_rn(__fmul_rn(a"),
        ("write_blocks", "8 * c + 2 * j + e", "8 * c + 4 * e + j"),
        ("read_blocks", "(token < count)", "(token <= count)"),
        ("choose", "1.0f + expf(-row", "1.0f + expf(row"),
        ("choose", "four < own", "four > own"),
        ("choose", "keys[other] == key", "keys[other] > key"),
        ("choose", "found[j] < found[i]", "j < i"),
        ("choose", "value + 0.0f", "value"),
        ("group", "(four.w == expert);", "(four.w > expert);"),
        ("group", "to[3]", "to[2]"),
        ("group", "ends[own] - counts[own]", "ends[own]"),
        ("spread", "to[i]", "to[0]"),
        ("unpack", "r % 2 * (rows / 2)", "r % 2 * (rows / 4)"),
        ("join", "-rows - 1 - query", "-rows - 2 - query"),
        ("join", "within += blockDim.x", "within += width"),
    ],
)
def test_a_mistake_is_seen(tmp_path: Path, check: str, right: str, wrong: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = SOURCE.read_text()
    assert right in source
    bench = Bench(build_host(compiler, tmp_path, source.replace(right, wrong)), "cpu")
    run: Callable[[], None] = getattr(bench, f"check_{check}")
    with pytest.raises(AssertionError):
        run()


def test_the_kernels_compile_without_local_memory() -> None:
    pytest.importorskip("cuda.core")
    _, log = compile_source(SOURCE.read_text(), {})
    assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(KERNELS)
    resources_of(log).check()


def test_a_block_adds_by_it(on_host: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = synthetic_model(NORTH_MICRO_SHAPE, dtype=torch.bfloat16)
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        plain = model.full(tokens)
        monkeypatch.setattr(cohere2_moe, "on_gpu", lambda x: True)  # the other modules have their own
        model.use(on_host)
        assert torch.equal(model.full(tokens), plain)
        monkeypatch.setattr(OnHost, "add", lambda self, x, y, z: x + y)
        assert not torch.equal(model.full(tokens), plain)


def test_models_with_other_sizes_are_left_alone() -> None:
    assert fits(PRESETS["north-mini-code"])
    assert fits(PRESETS["llama-3.2-1b"])
    assert not fits(replace(NORTH_MICRO_SHAPE, head_dim=16))
    assert not fits(replace(NORTH_MICRO_SHAPE, hidden_size=16384))


def test_other_devices_are_left_alone() -> None:
    assert not available(torch.device("cpu"))


def test_more_parts_than_the_kernel_has_room_for_are_refused() -> None:
    """They would be written behind what is passed to it, which has one size on both sides."""
    values, sums, many = [torch.zeros(1, 1, 8)], [torch.zeros(1, 1)], _MOST_PARTS + 1
    with pytest.raises(ValueError, match="17 parts are more than 16"):
        Passes.join(OnHost(ctypes.CDLL(None)), values * many, sums * many, [False] * many, values[0])
    assert f"MOST_PARTS = {_MOST_PARTS};" in SOURCE.read_text()


def test_tensors_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        _passed(torch.zeros(4, 4)[:, :2])
