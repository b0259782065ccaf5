"""What is done before the first prompt, so that it need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from functools import partial

import pytest
import torch

from headrace.engine import build, rehearsal
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import EngineDeadError
from headrace.engine.torch_backend import TorchBackend
from headrace.model.batch import Span
from headrace.model.config import KVGroup, MoEMLP
from headrace.model.kv import KVCache
from headrace.model.memory import kv_bytes_per_token, prompt_bytes
from headrace.model.presets import NORTH_MINI_CODE
from headrace.model.sampling import SamplingParams
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
    assert {len(span.tokens) for span, _ in ran} >= {64, 128, 256, 512}


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


@pytest.mark.parametrize("free", [20 * 2**30, 80 * 2**30])
def test_the_pool_leaves_prompts_what_their_largest_pass_takes(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    config, dtype = NORTH_MINI_CODE, torch.bfloat16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 144 * 2**30))
    options = EngineOptions(prefill_chunk=8192)
    left = free - build._available_memory(torch.device("cuda"), build._reserve(config, options, dtype))
    routed = config.layers[1].mlp
    assert isinstance(routed, MoEMLP)
    slots = 8192 * routed.top_k
    experts = slots * (2 * config.hidden_size + 3 * routed.width) * 2
    past = kv_bytes_per_token(config, KVGroup.FULL, dtype) // 13 * config.max_positions
    parts = 16 * 8192 * config.num_heads * config.head_dim * 2
    assert left >= max(experts, past + parts)
    assert left >= 0.09 * free
    assert left < 6 * 2**30 or left < 0.11 * free
    assert prompt_bytes(config, tokens=512, context=4096, dtype=dtype) < 2**30
