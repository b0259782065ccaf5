"""The engine over the PyTorch model: what comes out is what the model says of each sequence alone."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from headrace.engine.backend import DecodeRow
from headrace.engine.build import build_engine
from headrace.engine.decode import fuse
from headrace.engine.options import EngineOptions
from headrace.engine.request import FinishReason, Output
from headrace.engine.torch_backend import TorchBackend
from headrace.model.batch import Span
from headrace.model.config import (
    KVGroup,
)
from headrace.model.kv import KVCache, blocks_for
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import preset
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.pack import pack_synthetic
from headrace.step.packed_model import packed_model
from tests.engine.north import generate, greedy, prompts


@pytest.mark.parametrize(("chunk", "steps"), [(16, 1), (100, 3), (512, 8)])
def test_a_batch_gives_what_each_prompt_gives_alone(
    model: Model, tokenizer: Tokenizer, chunk: int, steps: int
) -> None:
    options = EngineOptions(max_sequences=4, prefill_chunk=chunk, steps=steps, max_context=512)
    engine = build_engine(model, tokenizer, options)
    batch = prompts(5)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert generate(engine, batch, [params] * 5) == [greedy(model, prompt, 6) for prompt in batch]


def test_preemption_changes_nothing(model: Model, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    batch = [prompt[:50] * 2 for prompt in prompts(4, seed=5)]
    block = 3 * 2 * 64 * 2 * 32 * 4  # bytes of one block in all three layers
    results = []
    for blocks in (64, 5):
        options = EngineOptions(max_sequences=4, max_context=160, kv_memory=blocks * block, steps=4)
        engine = build_engine(model, tokenizer, options)
        results.append(generate(engine, batch, [params] * 4))
        assert (engine.state.preemptions > 0) == (blocks == 5)
    assert results[0] == results[1]


def test_sampled_tokens_do_not_depend_on_neighbours(model: Model, tokenizer: Tokenizer) -> None:
    options = EngineOptions(max_sequences=8, max_context=512)
    batch = prompts(5, seed=1)
    params = [
        SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.5, seed=seed, max_tokens=12)
        for seed in range(5)
    ]
    together = generate(build_engine(model, tokenizer, options), batch, params)
    engine = build_engine(model, tokenizer, options)
    alone = [generate(engine, [prompt], [one])[0] for prompt, one in zip(batch, params, strict=True)]
    assert together == alone
    other = [SamplingParams(temperature=1.2, seed=99, max_tokens=12)]
    assert generate(engine, batch[:1], other)[0] != alone[0], "the seed must matter"


def rows_of(model: Model, prompt: list[int], cache: KVCache, backend: TorchBackend) -> DecodeRow:
    """Prefill all but the last token of `prompt` into the first blocks, and make the row that goes on."""
    tables = {group: list(range(blocks_for(len(prompt) + 16))) for group in KVGroup}
    row = DecodeRow(
        slot=0,
        token=prompt[-1],
        position=len(prompt) - 1,
        tables=tables,
        prompt=prompt,
        output=[],
        params=SamplingParams(temperature=0),
        seed=0,
        max_tokens=100,
        stop_token_ids=frozenset(),
    )
    backend.prefill([Span(prompt[:-1], 0, tables)])
    return row


def test_a_call_ends_after_the_step_in_which_it_is_interrupted(model: Model) -> None:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 8), dtype=torch.float32)
    backend = TorchBackend(model, cache, max_rows=1)
    row = rows_of(model, prompts(1)[0] + [5], cache, backend)
    interrupt = threading.Event()
    made = []
    for sampled in backend.run([row], 10, interrupt):
        made.append(sampled)
        if len(made) == 3:
            interrupt.set()
    assert len(made) == 3


def test_a_row_ends_at_its_limit_and_its_stop_token(model: Model) -> None:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 8), dtype=torch.float32)
    backend = TorchBackend(model, cache, max_rows=1)
    prompt = [*prompts(1)[0], 7]
    first, second = greedy(model, prompt, 2)
    row = rows_of(model, prompt, cache, backend)
    row.stop_token_ids = frozenset([second])
    tokens = [item for sampled in backend.run([row], 10, threading.Event()) for item in sampled]
    assert [item.token for item in tokens if item is not None] == [first, second]
    row.max_tokens = 1
    assert len(list(backend.run([row], 10, threading.Event()))) == 1


def test_logprobs_come_with_every_token(model: Model, tokenizer: Tokenizer) -> None:
    engine = build_engine(model, tokenizer, EngineOptions(max_context=512))
    outputs: list[Output] = []
    prompt = prompts(1)[0]
    engine.submit(prompt, SamplingParams(temperature=0, logprobs=3, max_tokens=4), outputs.append)
    while engine.step():
        pass
    with torch.inference_mode():
        scores = model.full(torch.tensor([prompt]))[0, -1].log_softmax(-1)
    values, tokens = scores.topk(3)
    [first] = outputs[0].logprobs
    assert first.token == tokens[0]
    assert [token for token, _ in first.top] == tokens.tolist()
    torch.testing.assert_close(torch.tensor([value for _, value in first.top]), values)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_cached_prefixes_change_nothing(model: Model, tokenizer: Tokenizer) -> None:
    """Three turns of two conversations, with and without the cache; the window is crossed on the way."""
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 2
    made = []
    for prefix_cache in (True, False):
        options = EngineOptions(max_context=800, prefix_cache=prefix_cache, max_sequences=2)
        engine = build_engine(model, tokenizer, options)
        conversations = [prompts(1, seed=seed)[0] + [seed] * 70 for seed in (11, 12)]
        answers = []
        for turn in range(3):
            answers.append(generate(engine, conversations, params))
            conversations = [
                [*conversation, *answer, *prompts(1, seed=turn)[0]]
                for conversation, answer in zip(conversations, answers[-1], strict=True)
            ]
        made.append(answers)
        cache = engine._scheduler.blocks.cache
        assert (cache is not None and bool(cache.root.children)) == prefix_cache
    assert made[0] == made[1]


@pytest.mark.gpu
def test_prompts_that_go_ahead_on_a_gpu_write_the_same() -> None:
    """All fused steps, unpacking beside, and whole tiles; what follows on the usual stream waits for them.

    In parts, too, with passes in between that unpack their layers in the same memory.
    """
    shape = preset("north-mini-code")
    config = replace(shape, layers=shape.layers[:6])
    weights = pack_synthetic(config, device="cuda", dtype=torch.bfloat16)
    tables = {group: list(range(80)) for group in KVGroup}
    beside = {group: [80] for group in KVGroup}
    tokens = [token % 1000 for token in range(80 * 64)]
    caches = []
    for ahead, parts in ((False, [5]), (True, [5]), (True, [5]), (True, [1, 3, 1])):
        cache = KVCache(config, dict.fromkeys(KVGroup, 81), dtype=torch.bfloat16, device="cuda")
        model = packed_model(weights)
        assert fuse(model, cache, weights)
        backend = TorchBackend(model, cache, max_rows=1, ahead=ahead)
        for start, end in ((0, 100), (100, 3000), (3000, 5120)):
            advance = backend.begin([Span(tokens[start:end], start, tables)])
            for layers in parts:
                advance(layers)
                with torch.inference_mode():
                    model([Span([7], 0, beside)], cache)
        caches.append([pages[:80].clone() for pages in cache.pages])
    for other in caches[1:]:
        assert all(torch.equal(*pages) for pages in zip(caches[0], other, strict=True))
    assert all(pages.isfinite().all() for pages in caches[0])


@pytest.mark.gpu
def test_fused_steps_on_a_gpu_leave_what_plain_ones_leave() -> None:
    """At North's widths and over two chunks of a long prompt: as near as plain steps over other chunks come.

    Sums differ in their last bits, and now and then that decides which expert a token goes to.
    """
    shape = preset("north-mini-code")
    config = replace(shape, layers=shape.layers[:6])
    weights = pack_synthetic(config, device="cuda", dtype=torch.bfloat16)
    count = 12288
    tables = {group: list(range(blocks_for(count))) for group in KVGroup}
    tokens = [token * 7 % 1000 for token in range(count)]

    def filled(fused: bool, chunk: int) -> list[torch.Tensor]:
        cache = KVCache(
            config, dict.fromkeys(KVGroup, blocks_for(count)), dtype=torch.bfloat16, device="cuda"
        )
        weights.fused = None
        model = packed_model(weights)
        assert not fused or fuse(model, cache, weights)
        backend = TorchBackend(model, cache, max_rows=1)
        for start in range(0, count, chunk):
            backend.prefill([Span(tokens[start : start + chunk], start, tables)])
        return cache.pages

    ours, right, otherwise_cut = filled(True, 8192), filled(False, 8192), filled(False, 3072)
    assert torch.equal(ours[0], right[0])
    for layer in range(1, len(right)):
        noise = error_of(otherwise_cut[layer], right[layer])
        assert error_of(ours[layer], right[layer]) < 2 * noise < 0.5
        assert error_of(ours[layer].roll(1, 0), right[layer]) > 0.3  # were they other blocks


def error_of(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Of all numbers together, relative."""
    return float((ours.float() - right.float()).norm() / right.float().norm())
