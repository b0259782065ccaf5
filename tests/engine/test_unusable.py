"""A request for which the model gives no numbers ends alone: others, then and later, are not touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.engine.blocks import BlockManager
from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions
from headrace.engine.prefix import PrefixCache
from headrace.engine.request import FinishReason, Output
from headrace.model import paging
from headrace.model.config import KVGroup
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tests.engine.north import VOCABULARY, greedy, north, prompts

POISON = VOCABULARY - 1  # a token whose embedding is not a number
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HOT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={POISON: 100.0})


@pytest.fixture(scope="module")
def model() -> Model:
    model = synthetic_model(north(), seed=3)
    with torch.no_grad():
        model.embed.weight[POISON] = torch.nan
        assert model.head is not None
        model.head.weight[POISON] = 0  # never the most likely one by itself
    return model


def clean(count: int, *, seed: int) -> list[list[int]]:
    return [[token % POISON for token in prompt] for prompt in prompts(count, seed=seed)]


def small_engine(model: Model, tokenizer: Tokenizer, **options: object) -> Engine:
    """An engine with 8 blocks a group, so that few requests use all of them."""
    block = 3 * 2 * 64 * 2 * 32 * 4  # bytes of a block in all three layers
    given = {"max_sequences": 4, "max_context": 320, "kv_memory": 8 * block, "steps": 4} | options
    return build_engine(model, tokenizer, EngineOptions(**given))  # type: ignore[arg-type]


def serve(engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[Output]]:
    outputs: list[list[Output]] = [[] for _ in jobs]
    for (prompt, params), sink in zip(jobs, outputs, strict=True):
        engine.submit(prompt, params, sink.append)
    while engine.step():
        pass
    engine.check()
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_failed(outputs: list[Output], *, made: int) -> None:
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert f"after {made} tokens" in (outputs[-1].error or "")
    assert "Send this one again" in (outputs[-1].error or "")
    assert len(tokens_of(outputs)) == made


@pytest.mark.parametrize("decode", ["torch", "oracle"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_one_of_several_running_requests_fails_alone(
    model: Model, tokenizer: Tokenizer, decode: str, prefix_cache: bool
) -> None:
    engine = small_engine(model, tokenizer, decode=decode, prefix_cache=prefix_cache, kv_memory=None)
    good = clean(2, seed=1)
    in_prompt = [*clean(1, seed=5)[0], POISON]
    outputs = serve(engine, [(good[0], GREEDY), (in_prompt, GREEDY), (good[1], GREEDY), (good[0], HOT)])
    assert [tokens_of(outputs[i]) for i in (0, 2)] == [greedy(model, prompt, 8) for prompt in good]
    assert_failed(outputs[1], made=0)
    assert_failed(outputs[3], made=1)  # it draws the poison as its first token
    assert tokens_of(outputs[3]) == [POISON]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_its_blocks_serve_again(model: Model, tokenizer: Tokenizer, prefix_cache: bool) -> None:
    engine = small_engine(model, tokenizer, prefix_cache=prefix_cache)
    poisoned = [POISON, *range(200)]
    [outputs] = serve(engine, [(poisoned, GREEDY)])
    assert_failed(outputs, made=0)
    assert engine.state.free_blocks == {"full": 8, "sliding": 8}  # nothing of it is cached
    for seed in range(3):
        batch = clean(4, seed=seed)
        outputs_of = serve(engine, [(prompt, GREEDY) for prompt in batch])
        assert [tokens_of(each) for each in outputs_of] == [greedy(model, prompt, 8) for prompt in batch]


def test_blocks_that_are_not_cleared_spoil_others(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above goes red without the clearing."""
    plan_group = paging.plan_group
    monkeypatch.setattr(
        paging, "plan_group", lambda *given: replace(plan_group(*given), begun=torch.empty(0))
    )
    with pytest.raises(AssertionError):
        test_its_blocks_serve_again(model, tokenizer, False)


def test_a_cache_that_does_not_forget_is_noticed(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockManager, "forget", lambda *_: None)
    with pytest.raises(AssertionError):
        test_its_blocks_serve_again(model, tokenizer, True)


def run_beside_one_that_fails(model: Model, tokenizer: Tokenizer) -> list[int]:
    """What a prompt gives a second time, the first time of which ran beside one that begins alike and fails.

    Both had the same tokens in blocks of their own, and the cache those of the one that fails.
    """
    engine = small_engine(model, tokenizer, kv_memory=None)
    longer = [token % POISON for token in range(7, 7 + 250)]
    failed: list[Output] = []
    sound: list[Output] = []
    engine.submit(longer[:150], replace(GREEDY, max_tokens=50), failed.append)
    engine.submit(longer, GREEDY, sound.append)
    while not failed:
        engine.step()
    first, second = engine._scheduler.running
    [mine, others] = [sequence.blocks.tables[KVGroup.FULL] for sequence in (first, second)]
    assert not set(mine) & set(others)
    engine._prefiller._cache.pages[0][mine[1]] = torch.nan  # type: ignore[attr-defined]
    while engine.step():
        pass
    assert_failed(failed, made=len(tokens_of(failed)))
    assert tokens_of(sound) == greedy(model, longer, 8)
    engine.check()
    [outputs] = serve(engine, [(longer, GREEDY)])
    return tokens_of(outputs)


def test_what_it_wrote_serves_nobody_with_the_same_tokens(model: Model, tokenizer: Tokenizer) -> None:
    longer = [token % POISON for token in range(7, 7 + 250)]
    assert run_beside_one_that_fails(model, tokenizer) == greedy(model, longer, 8)


def test_what_others_went_on_from_would_serve_them(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "drop", lambda *_: None)
    assert run_beside_one_that_fails(model, tokenizer) == []


def test_a_prefix_that_others_use_stays(model: Model, tokenizer: Tokenizer) -> None:
    engine = small_engine(model, tokenizer, kv_memory=None)
    prefix = [token % POISON for token in range(7, 7 + 192)]
    first, other = [*prefix, 1, 2, 3], [*prefix, *range(100, 170)]
    serve(engine, [(first, GREEDY), (other, GREEDY)])
    [failed] = serve(engine, [([*prefix, POISON, 5], GREEDY)])
    assert_failed(failed, made=0)
    sink: list[Output] = []
    request = engine.submit(other, GREEDY, sink.append)
    while engine.step():
        pass
    assert request.cached_tokens >= 192
    assert tokens_of(sink) == greedy(model, other, 8)
