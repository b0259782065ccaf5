"""A real model behind the endpoint: answers do not depend on who else is being answered."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.load import load
from tests.server import patient
from tests.server.scripted import serving

PROMPTS = ["a", "Hello there", "x" * 70, "def f(x):", "one two three " * 9, "?"]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with real_client() as client:
        yield client


@contextmanager
def real_client(**fields: Any) -> Iterator[openai.OpenAI]:
    """A client of a server of its own; `fields` are EngineOptions'."""
    loaded = load(None, synthetic="north-micro-shape", device="cpu", dtype="float32")
    options = EngineOptions(max_context=256, max_sequences=4, prefill_chunk=32, **fields)
    engine = AsyncEngine(build_engine(loaded.model, loaded.tokenizer, options))
    engine.start()
    try:
        with serving(loaded, engine) as url, patient.sdk(url) as client:
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


def test_the_prefix_cache_is_on_unless_it_is_switched_off(client: openai.OpenAI) -> None:
    """Nobody asked for it: the server above leaves the option as it is."""
    assert EngineOptions().prefix_cache
    assert cached_of_the_second(client) >= 64
    with real_client(prefix_cache=False) as without:
        assert cached_of_the_second(without) == 0


def cached_of_the_second(client: openai.OpenAI) -> int:
    """Cached tokens that the same prompt, sent twice, has the second time; none the first time."""
    prompt = "never sent before: " + "one two three four " * 8
    cached = []
    for _ in range(2):
        answer = client.completions.create(model="north-micro-shape", prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    return cached[1]
