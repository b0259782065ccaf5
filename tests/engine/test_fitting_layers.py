"""How many layers stay unpacked where nobody says. The numbers are North's, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from headrace import load as loading
from headrace.cli.info import _unpacked
from headrace.engine.build import available_memory, size_pool, told_unpacked
from headrace.engine.options import EngineOptions
from headrace.engine.unpacked import fitting_layers, unpacked_layers
from headrace.load import load
from headrace.model.config import KVGroup
from headrace.model.memory import kv_bytes
from headrace.model.presets import NORTH_MINI_CODE
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights
from headrace.step.packed_model import packed_model

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
GIB = 2**30
PAGES = 56.8 * GIB  # of packed weights: all matrices, 56.78 GiB
# 128 experts of three matrices of 2,048 by 768; 32 query heads, 32 columns of o, 4 of k and of v; a router.
LAYER = 2 * (128 * 3 * 2048 * 768 + 72 * 128 * 2048 + 128 * 2048)
ROUNDED = 2 * 2**20  # of each piece of memory: that of every layer, and of two that take turns
FULL_BLOCK, SLIDING_BLOCK = (2 * 64 * 4 * 128 * 2 * layers for layers in (13, 36))
WINDOWS = 16 * (64 + 2 + 1)  # blocks of 16 windows of 4,096: with what each begins and ends in, and 16 steps
TAILS = 2 * 65  # blocks of the sliding layers that the prefix cache has for every 32,768 tokens


def left_of(memory: int) -> Callable[[int], int]:
    return lambda taken: max(memory - taken, 0)


def fitting(memory: int, **options: int | bool) -> int:
    """How many fit if the pool and all matrices that are unpacked share so many bytes."""
    return fitting_layers(NORTH_MINI_CODE, EngineOptions(**options), left_of(memory), DTYPE)  # type: ignore[arg-type]


def beside(layers: int, pool: int) -> int:
    """Memory for so many layers, the two that take turns, and a pool."""
    return (layers + 2) * (LAYER + ROUNDED) + pool


def test_half_of_the_pool_is_the_most_that_they_take() -> None:
    """Two layers' memory is in use in any case; of 20 more, ten stay unpacked."""
    short = {"max_sequences": 1, "max_context": 1024}
    assert LAYER == 1_246_232_576
    assert fitting(22 * LAYER, **short) == 10
    assert fitting(22 * LAYER - 2, **short) == 9


def test_long_conversations_of_all_sequences_come_first() -> None:
    """16 of 65,536 tokens: 16,384 blocks of the full layers. The sliding ones have 16 windows, eight blocks
    for a chunk of 512, one that it begins in, and 32 times two tails. By half of the pool, 38.8 GB, 31 layers
    would fit."""
    needed = 16384 * FULL_BLOCK + (WINDOWS + 8 + 1 + 32 * TAILS) * SLIDING_BLOCK
    assert needed == 52_647_428_096
    memory = beside(20, needed)
    assert fitting(memory) == 20
    assert fitting(memory - 1) == 19
    assert fitting(memory, max_sequences=8) == 31


def test_shorter_contexts_need_less() -> None:
    """16 of 32,768 tokens: 512 blocks of the full layers each; half the tails, the rest as before."""
    needed = 16 * 512 * FULL_BLOCK + (WINDOWS + 8 + 1 + 16 * TAILS) * SLIDING_BLOCK
    memory = beside(12, needed)
    assert fitting(memory, max_context=32768) == 12
    assert fitting(memory - 1, max_context=32768) == 11
    assert fitting(memory) == 0, "16 long ones would not fit"


def test_no_context_gets_shorter() -> None:
    """One sequence of 262,144 tokens: 4,096 blocks of the full layers. The sliding ones have a window, two
    blocks that it begins and ends in, one for 16 steps, eight for a chunk of 512, and one it begins in."""
    needed = 4096 * FULL_BLOCK + (64 + 2 + 1 + 8 + 1) * SLIDING_BLOCK
    memory = beside(3, needed)
    alone: dict[str, int | bool] = {"max_sequences": 1, "prefix_cache": False}
    assert fitting(memory, **alone, max_context=262_144) == 3
    assert fitting(memory - 1, **alone, max_context=262_144) == 2
    assert fitting(memory, **alone) == 0, "without them a context could have some 400,000"


def test_a_pool_that_is_asked_for_leaves_them_what_is_left() -> None:
    """12 GiB, in which 16 long conversations have no room; half of what there is would be 7 layers."""
    memory = beside(5, 12 * GIB)
    assert fitting(memory, kv_memory=12 * GIB) == 5
    assert fitting(memory - 1, kv_memory=12 * GIB) == 4
    assert fitting(memory, kv_memory=100 * GIB) == 0
    assert fitting(22 * LAYER, kv_memory=GIB) == 10, "half, however little the pool is"


def test_no_more_than_there_are_and_none_without_room() -> None:
    assert fitting(10**15) == NORTH_MINI_CODE.num_layers == 49
    assert fitting(0) == 0
    assert fitting(10**15, kv_memory=2**20) == 0, "the engine says what is wrong when it is built"


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, total: float, *, pages: bool = True) -> None:
    """Half a GiB is CUDA's, and so much is taken by `pages`."""
    free = int((total - 0.5) * GIB - (PAGES if pages else 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, int(total * GIB)))


@pytest.mark.parametrize(("total", "layers"), [(139.8, 21), (94.0, 0), (79.2, 0)])
@pytest.mark.parametrize("loaded", [True, False])
def test_an_h200_has_room_and_a_gpu_of_80_gigabytes_keeps_its_pool(
    total: float, layers: int, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the H200 82.5 GiB are free, 80.2 beside two layers. A layer takes 1.1626, 21 of them leave 55.76.
    The pool gets nine tenths, 50.18. By half of it without them 31 would fit.

    16 times 65,536 tokens are 16,384 blocks of the full layers, 26 GiB, beside 1,072 + 257 + 32 * 130 of the
    sliding ones with a chunk of 16,384, 24.12: the 22nd is too much. The others have 30.9 and 17.6 at most.
    """
    on_a_gpu(monkeypatch, total, pages=loaded)
    to_come = 0 if loaded else int(PAGES)
    found = unpacked_layers(EngineOptions(), NORTH_MINI_CODE, device=GPU, dtype=DTYPE, to_come=to_come)
    assert found == layers


def test_memory_that_pytorch_keeps_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing leaves 2 GiB with PyTorch, which are two layers fewer."""
    on_a_gpu(monkeypatch, 139.8 - 2)
    assert unpacked_layers(EngineOptions(), NORTH_MINI_CODE, device=GPU, dtype=DTYPE) == 19
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: on_a_gpu(monkeypatch, 139.8))
    assert unpacked_layers(EngineOptions(), NORTH_MINI_CODE, device=GPU, dtype=DTYPE) == 21


def tokens_beside(layers: int, options: EngineOptions) -> int:
    """What the full layers of the pool hold that is made on the GPU once so many layers are there."""
    taken = (layers + 2) * (LAYER + ROUNDED)
    left = available_memory(NORTH_MINI_CODE, options, device=GPU, dtype=DTYPE, taken=taken)
    sizes, _ = size_pool(NORTH_MINI_CODE, options, available=left, dtype=DTYPE)
    return sizes[KVGroup.FULL] * 64


@pytest.mark.parametrize("sequences", [4, 12, 16, 20])
@pytest.mark.parametrize("context", [None, 100_000, 20_000])
@pytest.mark.parametrize("cache", [True, False])
def test_the_pool_that_is_made_has_the_tokens_of_all_sequences(
    sequences: int, context: int | None, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer more would break that, or take more than half: 31.08 layers."""
    on_a_gpu(monkeypatch, 139.8)
    options = EngineOptions(max_sequences=sequences, max_context=context, prefix_cache=cache)
    layers = unpacked_layers(options, NORTH_MINI_CODE, device=GPU, dtype=DTYPE)
    options, needed = (
        options.on_gpu(torch.cuda.mem_get_info(GPU)[1]),
        sequences * min(context or 65536, 65536),
    )
    assert layers > 0
    assert tokens_beside(layers, options) >= needed
    assert layers == 31 or tokens_beside(layers + 1, options) < needed


def test_what_sequences_hold_while_they_are_decoded_would_be_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 of 65,536 tokens hold 30.6 GiB, 31 layers leave 38.7: but a third of that is for cached tails."""
    on_a_gpu(monkeypatch, 139.8)
    assert 16 * kv_bytes(NORTH_MINI_CODE, 65536, DTYPE) < 30.6 * GIB
    assert tokens_beside(31, EngineOptions().on_gpu(140 * GIB)) < 16 * 65536


def test_a_cpu_has_none_unless_one_says_so() -> None:
    cpu = torch.device("cpu")
    for options, layers in ((EngineOptions(), 0), (EngineOptions(unpacked_layers=3), 3)):
        assert unpacked_layers(options, NORTH_MINI_CODE, device=cpu, dtype=DTYPE) == layers


@pytest.mark.parametrize(("decode", "layers"), [("kernel", 5), ("torch", 0)])
def test_a_model_that_is_loaded_has_them(decode: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is packed; a CPU stands for the GPU."""
    made: list[int] = []

    def noted(weights: PackedWeights, *, kept: int = 0) -> Model:
        made.append(kept)
        return packed_model(weights, kept=kept)

    monkeypatch.setattr(loading, "packed_model", noted)
    monkeypatch.setattr(loading, "choose_decode", lambda *_, **__: decode)
    monkeypatch.setattr(loading, "unpacked_layers", lambda *_, **__: 5)
    loaded = load(
        None, synthetic="north-micro-shape", device="cpu", dtype="bfloat16", options=EngineOptions()
    )
    assert loaded.unpacked == layers
    assert made == ([layers] if decode == "kernel" else [])


def test_one_is_told_what_they_cost() -> None:
    """Beside two layers 1,000 blocks of the full layers have room, and 76 of the sliding ones; without them
    2 * 1,246,232,576 / 1,703,936 more, 1,462."""
    pool = 1000 * FULL_BLOCK + 76 * SLIDING_BLOCK
    options = EngineOptions(unpacked_layers=2, max_sequences=1, prefix_cache=False)
    told = told_unpacked(NORTH_MINI_CODE, options, left_of(4 * LAYER + pool), DTYPE)
    assert told == (
        "2 of 49 layers stay unpacked for prompts, in 2.3 GiB; the KV cache has 1.9 GiB for 64,000 tokens, "
        "93,568 fewer than without them, and for contexts of up to 64,000 tokens"
    )
    none = replace(options, unpacked_layers=0)
    assert told_unpacked(NORTH_MINI_CODE, none, left_of(pool), DTYPE).startswith("No layers stay unpacked")
    asked = replace(options, kv_memory=pool)
    assert " 0 fewer than without" in told_unpacked(NORTH_MINI_CODE, asked, left_of(9 * LAYER + pool), DTYPE)


def test_info_tells_it_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, 139.8, pages=False)
    told = _unpacked(NORTH_MINI_CODE, GPU, DTYPE)
    assert told.startswith("21 of 49 layers stay unpacked for prompts, in 24.4 GiB")
    assert "the KV cache has 50.1 GiB for 1,048,576 tokens" in told, "16 of 65,536"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    assert _unpacked(NORTH_MINI_CODE, GPU, DTYPE).startswith("No layers")
