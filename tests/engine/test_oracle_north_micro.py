"""The trained model through the plan: real text, past its window, token for token what PyTorch makes of it."""

from __future__ import annotations

import heapq
import inspect
import textwrap

from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.load import load
from headrace.model.sampling import SamplingParams
from tests.engine.test_torch_backend import generate

TOKENS = 128


def test_128_greedy_tokens_across_the_window() -> None:
    loaded = load("north-micro", device="cpu", dtype="float32")
    window = loaded.model.config.window
    assert window is not None
    prompts = [
        loaded.tokenizer.encode(inspect.getsource(module))[: window - before]
        for module, before in ((heapq, 60), (textwrap, 5))
    ]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    made = []
    for decode in ("torch", "oracle"):
        options = EngineOptions(decode=decode, max_context=2 * window, max_sequences=len(prompts))
        engine = build_engine(loaded.model, loaded.tokenizer, options)
        made.append(generate(engine, prompts, [params] * len(prompts)))
    assert made[0] == made[1]
    for prompt, tokens in zip(prompts, made[1], strict=True):
        assert len(tokens) == TOKENS
        assert len(prompt) < window < len(prompt) + TOKENS
        assert len(set(tokens)) > 10  # text, not one token over and over
