"""The engine over the oracle: what comes out of the plan is what comes out of the PyTorch model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.oracle_backend import OracleBackend
from headrace.engine.request import Output
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.constraint import Mask, mask_of
from headrace.model.kv import KVCache
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.oracle.order import RandomOrder
from tests.engine.north import VOCABULARY, generate, north, prompts


def both(model: Model, tokenizer: Tokenizer, params: list[SamplingParams], **options: Any) -> list[list[int]]:
    """The tokens of the same requests from both backends, which must be equal."""
    batch = prompts(len(params), seed=2)
    made = []
    for decode in ("torch", "oracle"):
        settings = EngineOptions(decode=decode, **options)
        made.append(generate(build_engine(model, tokenizer, settings), batch, params))
    assert made[0] == made[1]
    return made[1]


def test_greedy_requests_of_any_length(model: Model, tokenizer: Tokenizer) -> None:
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * n, ignore_eos=True) for n in range(6)]
    made = both(model, tokenizer, params, max_sequences=4, prefill_chunk=100, steps=3, max_context=512)
    assert [len(tokens) for tokens in made] == [4 + 3 * n for n in range(6)]


def test_sampled_requests(model: Model, tokenizer: Tokenizer) -> None:
    params = [
        SamplingParams(temperature=1.5, top_p=0.8, seed=1, max_tokens=9),
        SamplingParams(temperature=1.0, top_k=9, min_p=0.02, seed=2, max_tokens=9),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, seed=3, max_tokens=9),
        SamplingParams(temperature=0, repetition_penalty=1.4, logprobs=4, max_tokens=9),
    ]
    both(model, tokenizer, params, max_sequences=4, max_context=512)


def test_a_token_counts_once_in_the_call_that_makes_it(model: Model, tokenizer: Tokenizer) -> None:
    """The engine appends it to the sequence's output while the launch still runs."""
    few = {3: 100.0, 5: 100.0, 8: 100.0}
    params = [SamplingParams(temperature=0, frequency_penalty=0.5, logit_bias=few, max_tokens=16)]
    [made] = both(model, tokenizer, params, max_sequences=1, max_context=512)
    assert set(made) == set(few)


class Ladder:
    """Allows only the tokens of one residue after another, and none of them in its third place."""

    def __init__(self, residue: int) -> None:
        self.taken: list[int] = []
        self._residue = residue

    def mask(self) -> Mask | None:
        if len(self.taken) == 2:
            return None
        residue = (self._residue + len(self.taken)) % 5
        return mask_of((token for token in range(VOCABULARY) if token % 5 == residue), VOCABULARY)

    def accept(self, token: int) -> None:
        self.taken.append(token)


def test_constraints_give_what_they_give_on_torch(model: Model, tokenizer: Tokenizer) -> None:
    """Rows with and without a mask in one batch, drawn and greedy, over several steps a call."""
    drawn = SamplingParams(temperature=1.3, top_p=0.9, seed=5, max_tokens=9, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    batch = prompts(4, seed=6)
    made = []
    for decode in ("torch", "oracle"):
        engine = build_engine(model, tokenizer, EngineOptions(decode=decode, max_context=512, steps=4))
        ladders = [Ladder(1), Ladder(3), None, None]
        outputs: list[list[Output]] = [[] for _ in batch]
        for prompt, params, ladder, sink in zip(
            batch, (drawn, greedy, drawn, greedy), ladders, outputs, strict=True
        ):
            engine.submit(prompt, params, sink.append, constraint=ladder)
        while engine.step():
            pass
        made.append([[token for output in sink for token in output.token_ids] for sink in outputs])
        for residue, tokens, ladder in zip((1, 3), made[-1], ladders, strict=False):
            assert ladder is not None
            assert ladder.taken == tokens
            assert [t % 5 for i, t in enumerate(tokens) if i != 2] == [
                (residue + i) % 5 for i in range(9) if i != 2
            ]
    assert made[0] == made[1]


def test_any_order_serves_the_same(model: Model, tokenizer: Tokenizer) -> None:
    """The engine's lists grow while a launch runs; a launch must not see that."""
    params = [SamplingParams(temperature=0, presence_penalty=0.7, max_tokens=8, ignore_eos=True)] * 2
    batch = prompts(2, seed=4)
    made = []
    for order in (None, RandomOrder(1)):
        engine = build_engine(model, tokenizer, EngineOptions(decode="oracle", max_context=512))
        backend = engine._backend
        assert isinstance(backend, OracleBackend)
        backend._order = order
        made.append(generate(engine, batch, params))
    assert made[0] == made[1]


def test_what_the_oracle_cannot_run_is_refused(model: Model, tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="max_sequences: is 17; the oracle decodes at most 16"):
        build_engine(model, tokenizer, EngineOptions(decode="oracle", max_sequences=17, max_context=512))
    odd: ModelConfig = replace(north(), head_dim=24)
    with pytest.raises(OptionError, match="the oracle cannot run this model: head_dim is 24"):
        build_engine(synthetic_model(odd), tokenizer, EngineOptions(decode="oracle", max_context=512))


def test_prepare_comes_first(model: Model) -> None:
    cache = KVCache(model.config, dict.fromkeys(KVGroup, 4), dtype=torch.float32)
    backend = OracleBackend(model, cache, max_rows=32)
    assert backend.max_rows == 16
    with pytest.raises(RuntimeError, match="prepare"):
        backend._oracle(1)
    backend.prepare()
    assert backend._oracle(3).plan.sizes.rows == 4
    assert backend._oracle(3) is backend._oracle(4)
