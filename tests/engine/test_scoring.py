"""Log-probabilities of prompts: those of the model over the whole sequence at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine.build import build_engine
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import ContextLengthError, FinishReason, Output, Request, ScoringError
from headrace.model.sampling import ParameterError, SamplingParams
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tests.engine.north import greedy, north, prompts
from tests.engine.test_engine import text_engine

SCORE = SamplingParams(prompt_logprobs=3, max_tokens=0)


def serve(engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> list[tuple[Request, list[Output]]]:
    sinks: list[list[Output]] = [[] for _ in jobs]
    requests = [
        engine.submit(prompt, params, sink.append) for (prompt, params), sink in zip(jobs, sinks, strict=True)
    ]
    while engine.step():
        pass
    engine.check()
    return list(zip(requests, sinks, strict=True))


def assert_scored(model: Model, request: Request) -> None:
    """The scores are those of the whole sequence without a cache."""
    assert len(request.prompt_logprobs) == len(request.prompt) - 1
    with torch.inference_mode():
        wanted = model.full(torch.tensor([request.prompt]))[0].double().log_softmax(-1)
    for place, entry in enumerate(request.prompt_logprobs):
        assert entry.token == request.prompt[place + 1]
        assert entry.logprob == pytest.approx(float(wanted[place, entry.token]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(
            wanted[place].topk(3).values.tolist(), abs=1e-4
        )
        for token, value in entry.top:
            assert value == pytest.approx(float(wanted[place, token]), abs=1e-4)


@pytest.mark.parametrize("decode", ["torch", "oracle"])
@pytest.mark.parametrize("chunk", [1, 17, 512])
def test_scores_are_the_models_in_any_chunking(
    model: Model, tokenizer: Tokenizer, chunk: int, decode: str
) -> None:
    options = EngineOptions(max_sequences=4, prefill_chunk=chunk, max_context=512, decode=decode)
    engine = build_engine(model, tokenizer, options)
    made = serve(engine, [(prompt, SCORE) for prompt in prompts(5, seed=7)])
    for request, outputs in made:
        assert_scored(model, request)
        assert [(o.token_ids, o.finish_reason) for o in outputs] == [((), FinishReason.LENGTH)]


def test_beside_others_after_a_cached_prefix_and_with_an_answer(model: Model, tokenizer: Tokenizer) -> None:
    engine = build_engine(model, tokenizer, EngineOptions(max_sequences=4, max_context=512))
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    both = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=3)
    prompt = list(range(200))
    serve(engine, [(prompt, plain)])  # now it is cached
    made = serve(engine, [(prompt, both), (prompt, plain), ([5], SCORE), (prompt[::-1], SCORE)])
    for _, outputs in (made[0], made[1]):
        assert [token for output in outputs for token in output.token_ids] == greedy(model, prompt, 6)
    for index in (0, 2, 3):
        assert_scored(model, made[index][0])
    assert made[0][0].cached_tokens == 0
    assert made[1][0].cached_tokens > 0
    assert made[1][0].prompt_logprobs == []


def test_a_preemption_scores_nothing_twice(model: Model, tokenizer: Tokenizer) -> None:
    block = 3 * 2 * 64 * 2 * 32 * 4  # bytes of a block in all three layers
    options: dict[str, Any] = {"max_sequences": 4, "max_context": 256, "prefill_chunk": 48}
    engine = build_engine(model, tokenizer, EngineOptions(kv_memory=5 * block, **options))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=3)
    made = serve(engine, [([n, *range(100)], params) for n in range(4)])
    assert engine.state.preemptions > 0
    for request, outputs in made:
        assert_scored(model, request)
        assert sum(len(output.token_ids) for output in outputs) == 60


def test_scores_that_are_no_numbers_end_the_request(tokenizer: Tokenizer) -> None:
    spoilt = synthetic_model(north(), seed=4)
    with torch.no_grad():
        spoilt.embed.weight[3] = torch.nan
    engine = build_engine(spoilt, tokenizer, EngineOptions(max_sequences=2, max_context=512))
    (_, bad), (good, _) = serve(engine, [([1, 2, 3, 4], SCORE), ([1, 2, 4, 5], SCORE)])
    assert bad[-1].finish_reason is FinishReason.ERROR
    assert_scored(spoilt, good)


def test_what_cannot_be_scored_is_refused(model: Model, tokenizer: Tokenizer) -> None:
    with pytest.raises(ScoringError, match="cannot give the log-probabilities of a prompt"):
        text_engine().submit([1], SCORE, print)
    with pytest.raises(ParameterError, match="max_tokens: must be 1 or more"):
        SamplingParams(max_tokens=0)
    engine = build_engine(model, tokenizer, EngineOptions(max_context=128))
    engine.submit([1] * 128, SCORE, lambda _: None)  # nothing has to follow
    with pytest.raises(ContextLengthError, match=r"requested 129 tokens \(129 in the messages\)"):
        engine.submit([1] * 129, SCORE, print)
