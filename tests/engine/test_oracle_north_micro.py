"""The trained model through the plan: real text, past its window, token for token as PyTorch makes it."""

from __future__ import annotations

import heapq
import inspect
import textwrap

from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.load import load
from headrace.model.sampling import SamplingParams
from tests.engine.north import generate


def test_greedy_tokens_across_the_window() -> None:
    """128 tokens of one prompt, and a few of another beside it; both cross the window."""
    loaded = load("north-micro", device="cpu", dtype="float32")
    window = loaded.model.config.window
    assert window is not None
    counts = (128, 24)
    prompts = [
        loaded.tokenizer.encode(inspect.getsource(module))[: window - count // 2]
        for module, count in zip((heapq, textwrap), counts, strict=True)
    ]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    made = []
    for decode in ("torch", "oracle"):
        options = EngineOptions(decode=decode, max_context=2 * window, max_sequences=len(prompts))
        engine = build_engine(loaded.model, loaded.tokenizer, options)
        made.append(generate(engine, prompts, params))
    assert made[0] == made[1]
    for prompt, tokens, count in zip(prompts, made[1], counts, strict=True):
        assert len(tokens) == count
        assert len(prompt) < window < len(prompt) + count
        assert len(set(tokens)) > 10  # text, not one token over and over
