"""What is done before the first prompt, so that it need not wait for it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from headrace.engine import build, rehearsal
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.kernel_backend import KernelBackend
from headrace.engine.options import GPU_CHUNK, SMALL_GPU_CHUNK, EngineOptions
from headrace.engine.request import EngineDeadError
from headrace.engine.torch_backend import TorchBackend
from headrace.model.batch import Span
from headrace.model.config import KVGroup, ModelConfig, MoEMLP
from headrace.model.kv import KVCache
from headrace.model.memory import kv_bytes_per_token, prompt_bytes
from headrace.model.presets import NORTH_MINI_CODE
from headrace.model.sampling import SamplingParams
from headrace.model.tiled import TILE
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tests.engine.north import generate, prompts
from tests.engine.simulated import Machine, gaps_beside_a_long_prompt, machine


def run_on(backend: TorchBackend, span: Span, layers: int) -> None:
    backend.begin([span])(layers)


def rehearsed(model: Model, cache: KVCache) -> tuple[list[tuple[Span, int]], list[tuple[int, float]]]:
    """Passes and their layers, and what was told of their cost."""
    backend = TorchBackend(model, cache, max_rows=4)
    ran: list[tuple[Span, int]] = []

    def run(span: Span, layers: int) -> None:
        ran.append((span, layers))
        run_on(backend, span, layers)

    return ran, rehearsal.rehearse(model.config, cache, run, tokens=600, context=1500)


def test_a_rehearsal_leaves_no_trace_in_the_pages(model: Model) -> None:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 3), dtype=torch.float32)
    cleared = [pages.clone() for pages in cache.pages]
    written: list[bool] = []

    class Watched(KVCache):
        def write_blocks(self, layer: int, blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            super().write_blocks(layer, blocks, k, v)
            written.append(bool(self.pages[layer][0].any()))

    cache.__class__ = Watched
    rehearsed(model, cache)
    assert any(written)
    assert all(torch.equal(*pages) for pages in zip(cache.pages, cleared, strict=True))


def test_the_largest_pass_after_the_longest_past_comes_first(model: Model) -> None:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 3), dtype=torch.float32)
    ran, timed = rehearsed(model, cache)
    first, layers = ran[0]
    assert (first.start, first.end) == (900, 1500)
    assert {(layer.window, layer.mlp) for layer in model.config.layers[:layers]} == {
        (layer.window, layer.mlp) for layer in model.config.layers
    }
    assert [tokens for tokens, _ in timed] == [64, 512]
    assert all(seconds > 0 for _, seconds in timed)
    assert all(len(set(span.tokens)) > len(span.tokens) / 2 for span, _ in ran), "all go to the same experts"


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_there_are_passes_of_every_size_with_a_past_and_without(model: Model, size: int) -> None:
    ran, _ = rehearsed(model, KVCache(model.config, dict.fromkeys(KVGroup, 3), dtype=torch.float32))
    assert {span.start > 0 for span, _ in ran if len(span.tokens) == size} == {False, True}


@pytest.mark.parametrize("tokens", [8192, 5000])
def test_chunks_that_go_from_tile_to_tile_are_of_sizes_that_have_come(tokens: int) -> None:
    came = {len(span.tokens) for span in rehearsal.spans(NORTH_MINI_CODE, tokens=tokens, context=500_000)}
    assert {TILE * tiles for tiles in range(1, tokens // TILE + 1)} <= came
    assert max(came) == tokens


@pytest.mark.parametrize("size", [64, 512, 4096])
def test_kernels_of_even_and_of_odd_numbers_of_tokens_are_loaded(size: int) -> None:
    came = {len(span.tokens) for span in rehearsal.spans(NORTH_MINI_CODE, tokens=8192, context=500_000)}
    assert {size, size - 1} <= came


def test_attention_is_planned_before_the_first_pass(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def plan(*given: object, tokens: int, context: int) -> int:
        done.append((tokens, context))
        return 0

    monkeypatch.setattr(rehearsal, "plan_attention", plan)
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 3), dtype=torch.float32)
    rehearsal.rehearse(
        model.config, cache, lambda span, layers: done.append(layers), tokens=600, context=1500
    )
    assert done[0] == (600, 1500)
    assert len(done) > 1


def test_on_a_gpu_there_is_a_rehearsal_of_the_models_own_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere there is nothing to do."""
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 3), dtype=torch.float32)
    backend = TorchBackend(model, cache, max_rows=4)
    spans, sizes, begun = [Span([1], 0, {}), Span([1, 2], 5, {})], [], []

    def rehearse(config: object, given_cache: object, run: rehearsal.Run, **given: int) -> Any:
        assert (config, given_cache) == (model.config, cache)
        sizes.append(given)
        for layers, span in enumerate(spans):
            run(span, layers)
        return [(64, 0.5)]

    def begin(chunks: Seq[Span]) -> Callable[[int], None]:
        return lambda layers: begun.append((*chunks, layers))

    monkeypatch.setattr("headrace.engine.torch_backend.rehearse", rehearse)
    monkeypatch.setattr(backend, "begin", begin)
    assert backend.rehearse(tokens=600, context=1500) == []
    monkeypatch.setattr(Model, "device", torch.device("cuda"))
    assert backend.rehearse(tokens=600, context=1500) == [(64, 0.5)]
    assert sizes == [{"tokens": 600, "context": 1500}]
    assert begun == [(spans[0], 0), (spans[1], 1)]


def test_tokens_are_the_same_after_a_rehearsal(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for rehearses in (False, True):
        engine = build_engine(model, tokenizer, EngineOptions(max_context=512, max_sequences=4))
        if rehearses:
            backend = engine._prefiller
            assert isinstance(backend, TorchBackend)
            rehearsal.rehearse(
                model.config,
                backend._cache,
                partial(run_on, backend),
                tokens=200,
                context=512,
            )
        made.append(generate(engine, prompts(4, seed=3), [params] * 4))
    assert made[0] == made[1]


class Rehearsed(Machine):
    """A machine that tells what passes cost before the first."""

    thread: str | None = None
    failure: Exception | None = None

    def rehearse(self, *, tokens: int, context: int) -> list[tuple[int, float]]:
        type(self).thread = threading.current_thread().name
        if self.failure is not None:
            raise self.failure
        return [(count, 0.036 + 22e-6 * count) for count in (64, 512, 2048, 8192) if count <= tokens]

    def prefill(self, chunks: Seq[Span]) -> None:
        raise AssertionError("there are layers")


def test_costs_are_known_before_the_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Rehearsed)
    gaps, seconds = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=4, rehearse=True)
    unknown, late = gaps_beside_a_long_prompt(monkeypatch, layered=True, streams=4)
    assert max(gaps) < 0.0405
    assert sorted(gaps)[len(gaps) // 2] >= sorted(unknown)[len(unknown) // 2]
    assert seconds < late


def test_an_engine_changes_nothing_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Rehearsed)
    before = sys.getswitchinterval(), gc.get_freeze_count()
    engine = AsyncEngine(machine(monkeypatch, layered=True)[0])
    engine.start(rehearse=True)
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == before
    engine.close()


def test_an_engine_rehearses_on_its_own_thread_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Rehearsed)
    core, _ = machine(monkeypatch, layered=True)
    engine = AsyncEngine(core)
    told: list[str | None] = [engine.unready]
    rehearse = core.rehearse

    def watched() -> None:
        told.append(engine.unready)
        rehearse()

    monkeypatch.setattr(core, "rehearse", watched)
    engine.start(rehearse=True)
    assert [*told, engine.unready] == ["the engine has not started yet"] * 2 + [None]
    engine.close()
    assert Rehearsed.thread == "headrace-engine"
    assert core._scheduler.pace._cost.known


def test_an_engine_whose_rehearsal_fails_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.simulated.Machine", Rehearsed)
    monkeypatch.setattr(Rehearsed, "failure", RuntimeError("out of memory"))
    engine = AsyncEngine(machine(monkeypatch, layered=True)[0])
    with pytest.raises(EngineDeadError, match="out of memory"):
        engine.start(rehearse=True)
    assert engine.dead


class Kernels:
    """Notes who rehearses them, and when."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def prepare(self) -> None:
        self.done.append("prepared")

    def rehearse(self) -> None:
        self.done.append(f"steps on {threading.current_thread().name}")

    def launcher(self, rows: int) -> NoReturn:
        raise AssertionError("no request has come")


def test_steps_are_rehearsed_before_prompts_and_before_an_engine_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the engine's thread; they count as nobody's."""
    done: list[str] = []

    class Prompts(Machine):
        def rehearse(self, *, tokens: int, context: int) -> list[tuple[int, float]]:
            done.append("prompts")
            return []

    monkeypatch.setattr("tests.engine.simulated.Machine", Prompts)
    core, _ = machine(monkeypatch, layered=True)
    core._backend = KernelBackend(Kernels(done), max_rows=16, max_steps=16)
    engine = AsyncEngine(core)
    fresh, state, use = replace(core.counters), core.state, core.kv_use
    engine.start(rehearse=True)
    assert engine.unready is None
    assert done == ["steps on headrace-engine", "prompts"]
    assert (core.counters, core.state, core.kv_use) == (fresh, state, use)
    assert not core._scheduler.pace._cost.known
    core.check()
    engine.close()


def test_an_engine_whose_kernels_cannot_be_launched_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Kernels):
        def rehearse(self) -> None:
            raise RuntimeError("the decode kernel gave up")

    core, _ = machine(monkeypatch, layered=True)
    core._backend = KernelBackend(Broken([]), max_rows=16, max_steps=16)
    with pytest.raises(EngineDeadError, match="gave up"):
        AsyncEngine(core).start(rehearse=True)


class StopError(Exception):
    """Raised where the pool would be sized: no GPU is needed until then."""


@pytest.mark.parametrize("context", [None, 20_000])
@pytest.mark.parametrize("free", [8 * 2**30, 20 * 2**30, 80 * 2**30])
def test_the_pool_leaves_prompts_what_their_largest_pass_takes(
    monkeypatch: pytest.MonkeyPatch, free: int, context: int | None
) -> None:
    """On a GPU with as little free as this; a tenth of what there is in any case."""
    config, dtype, sized = NORTH_MINI_CODE, torch.bfloat16, []

    def size_pool(
        config: ModelConfig, options: EngineOptions, *, available: int, dtype: torch.dtype
    ) -> NoReturn:
        sized.append((options, available))
        raise StopError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 144 * 2**30))
    monkeypatch.setattr(build, "choose_decode", lambda *_, **__: "torch")
    monkeypatch.setattr(build, "size_pool", size_pool)
    model = cast(Model, SimpleNamespace(config=config, device=torch.device("cuda"), dtype=dtype))
    with pytest.raises(StopError):
        build_engine(model, cast(Tokenizer, None), EngineOptions(max_context=context))
    [(options, available)] = sized
    assert options.prefill_chunk == GPU_CHUNK == 16384
    left = free - available
    past = kv_bytes_per_token(config, KVGroup.FULL, dtype) // 13 * (context or config.max_positions)
    parts = 16 * GPU_CHUNK * config.num_heads * config.head_dim * 2
    assert left >= 1.5 * max(expert_bytes(config, GPU_CHUNK), past + parts)
    assert left >= 0.09 * free
    assert left < 6 * 2**30 or left < 0.11 * free


def expert_bytes(config: ModelConfig, tokens: int) -> int:
    """What every slot of a routed feed-forward holds in bfloat16: in and out, gate, up and their product."""
    routed = config.layers[1].mlp
    assert isinstance(routed, MoEMLP)
    return tokens * routed.top_k * (2 * config.hidden_size + 3 * routed.width) * 2


def test_a_pass_needs_what_its_experts_do_where_that_is_more() -> None:
    config, dtype = NORTH_MINI_CODE, torch.bfloat16
    routed = config.layers[1].mlp
    assert isinstance(routed, MoEMLP)
    layers = tuple(replace(layer, mlp=replace(routed, top_k=64)) for layer in config.layers)
    many = replace(config, layers=layers)
    needed = prompt_bytes(many, tokens=8192, context=8192, dtype=dtype)
    assert needed >= expert_bytes(many, 8192) > prompt_bytes(config, tokens=8192, context=8192, dtype=dtype)
    assert prompt_bytes(config, tokens=512, context=4096, dtype=dtype) < 2**30


@pytest.mark.parametrize(("gib", "chunk"), [(80, SMALL_GPU_CHUNK), (141, GPU_CHUNK)])
def test_a_small_gpu_has_smaller_chunks(
    gib: int, chunk: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What larger passes need would be missed by the KV pool."""
    sized: list[EngineOptions] = []

    def size_pool(config: ModelConfig, options: EngineOptions, **_: object) -> NoReturn:
        sized.append(options)
        raise StopError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * 2**30 // 2, gib * 2**30))
    monkeypatch.setattr(build, "choose_decode", lambda *_, **__: "torch")
    monkeypatch.setattr(build, "size_pool", size_pool)
    there = cast(
        Model, SimpleNamespace(config=model.config, device=torch.device("cuda"), dtype=torch.bfloat16)
    )
    for options, right in ((EngineOptions(), chunk), (EngineOptions(prefill_chunk=12288), 12288)):
        with pytest.raises(StopError):
            build_engine(there, cast(Tokenizer, None), options)
        assert sized[-1].prefill_chunk == right
