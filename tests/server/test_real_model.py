"""A real model behind the endpoint: answers do not depend on who else is being answered."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import openai
import pytest

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.load import load
from tests.server.scripted import serving

PROMPTS = ["a", "Hello there", "x" * 70, "def f(x):", "one two three " * 9, "?"]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    loaded = load(None, synthetic="north-micro-shape", device="cpu", dtype="float32")
    options = EngineOptions(max_context=256, max_sequences=4, prefill_chunk=32)
    engine = AsyncEngine(build_engine(loaded.model, loaded.tokenizer, options))
    engine.start()
    try:
        with (
            serving(loaded, engine) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield client
    finally:
        engine.close()


def complete(client: openai.OpenAI, prompt: str, *, stream: bool, temperature: float) -> str:
    if not stream:
        answer = client.completions.create(
            model="north-micro-shape", prompt=prompt, max_tokens=12, temperature=temperature, seed=3
        )
        return answer.choices[0].text
    chunks = client.completions.create(
        model="north-micro-shape", prompt=prompt, max_tokens=12, temperature=temperature, seed=3, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alone_or_together(client: openai.OpenAI, temperature: float) -> None:
    alone = [complete(client, prompt, stream=False, temperature=temperature) for prompt in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = pool.map(
            lambda prompt: complete(client, prompt, stream=True, temperature=temperature), PROMPTS
        )
    assert list(together) == alone


def test_logprobs_are_those_of_the_greedy_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="north-micro-shape", prompt="a", max_tokens=3, temperature=0, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for token, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert token == max(top.values())
