"""Request fields as sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.model.sampling import ParameterError, SamplingParams
from headrace.server.protocol import ChatBody, CompletionBody
from headrace.server.sampling import chat_sampling, choices, completion_sampling


def chat(**fields: Any) -> SamplingParams:
    return chat_sampling(ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields}))


def test_nothing_given_is_the_default() -> None:
    assert chat() == SamplingParams()
    assert completion_sampling(CompletionBody(prompt="x")) == SamplingParams()


def test_every_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "max_tokens": 7,
    }
    expected = SamplingParams(**fields, stop=("a",), logit_bias={5: -1.0}, logprobs=2)
    assert chat(**fields, stop="a", logit_bias={"5": -1}, logprobs=True, top_logprobs=2) == expected
    body = CompletionBody.model_validate(
        {"prompt": "x", **fields, "stop": ["a"], "logit_bias": {"5": -1}, "logprobs": 2}
    )
    assert completion_sampling(body) == expected


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_logprobs_without_top() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs is None


def test_ranges_are_those_of_the_parameters() -> None:
    with pytest.raises(ParameterError, match="min_p"):
        chat(min_p=2)


def test_choices() -> None:
    assert [params.seed for params in choices(SamplingParams(seed=2**64 - 1), 2)] == [2**64 - 1, 0]
    assert [params.seed for params in choices(SamplingParams(), 3)] == [None] * 3
    assert choices(SamplingParams(seed=1), None) == [SamplingParams(seed=1)]
