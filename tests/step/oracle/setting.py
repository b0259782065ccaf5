"""Models besides `headrace.step.oracle.world`'s own, ways to sample, and the PyTorch path's word on these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from headrace.model.config import ModelConfig
from headrace.model.sampler import Sampled, SampleRow, sample
from headrace.model.sampling import SamplingParams
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.world import GREEDY as GREEDY
from headrace.step.oracle.world import VOCABULARY as VOCABULARY
from headrace.step.oracle.world import WINDOW as WINDOW
from headrace.step.oracle.world import History as History
from headrace.step.oracle.world import World as World
from headrace.step.oracle.world import llama as llama
from headrace.step.oracle.world import model_of as model_of
from headrace.step.oracle.world import north as north
from headrace.step.oracle.world import plan_of as plan_of
from headrace.step.oracle.world import tokens_of as tokens_of
from headrace.step.oracle.world import weights_of as weights_of

# Every parameter of sampling by itself, and some together.
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=5.0),
    "cold": SamplingParams(temperature=0.01),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1, temperature=3.0),
    "top_k of nearly all": SamplingParams(top_k=VOCABULARY - 1, temperature=50.0),
    "top_k of more than all": SamplingParams(top_k=VOCABULARY + 5),
    "top_p": SamplingParams(top_p=0.8),
    "top_p small": SamplingParams(top_p=1e-9, temperature=2.0),
    "top_p nearly 1": SamplingParams(top_p=0.999999, temperature=20.0),
    "min_p": SamplingParams(min_p=0.2, temperature=2.0),
    "all three": SamplingParams(top_k=40, top_p=0.9, min_p=0.01, temperature=1.7),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    "rewards": SamplingParams(repetition_penalty=0.7, presence_penalty=-1.0, temperature=0),
    "bias": SamplingParams(logit_bias={5: 100.0, 299: 99.5, 17: -100.0}, temperature=2.0),
    "logprobs": SamplingParams(logprobs=20, temperature=1.5),
    "logprobs greedy": SamplingParams(logprobs=3, temperature=0, repetition_penalty=2.0),
    "logprob alone": SamplingParams(logprobs=0, top_p=0.5),
}
# Those for which many equal logits have to be told apart.
TIED = (
    SamplingParams(temperature=0, logprobs=20),
    SamplingParams(top_k=5, temperature=3.0),
    SamplingParams(top_k=40, temperature=30.0),
    SamplingParams(top_p=0.3, temperature=3.0),
    SamplingParams(top_k=50, top_p=0.7, temperature=30.0),
    SamplingParams(top_p=0.01, temperature=1.0),
)


def shallow(seed: int = 0) -> ModelConfig:
    """One layer, so that sampling is what takes the time. Seeds tell configs, and so models, apart."""
    return replace(north(), layers=north().layers[:1], norm_eps=1e-6 * (1 + seed))


def sequential() -> ModelConfig:
    """North's layers in sequential blocks: a plan in which fewer waits follow from others."""
    return replace(north(), parallel_block=False)


def expected(logits: Tensor, rows: Sequence[LaunchRow]) -> list[Sampled]:
    """What the sampler of the PyTorch path makes of these logits."""
    return sample(
        logits,
        [
            SampleRow(
                params=row.params,
                seed=row.seed,
                position=row.position + 1,
                prompt=row.prompt,
                output=row.output,
                mask=row.allowed,
            )
            for row in rows
        ],
    )


def same(results: Sequence[Sampled | None], wanted: Sequence[Sampled]) -> None:
    """Assert that rows have the tokens and log-probabilities that are wanted."""
    for index, (result, want) in enumerate(zip(results, wanted, strict=True)):
        assert result is not None
        assert result.token == want.token, f"row {index}"
        if want.logprobs is None:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        assert [token for token, _ in result.logprobs.top] == [token for token, _ in want.logprobs.top]
        ours = [result.logprobs.logprob, *(value for _, value in result.logprobs.top)]
        right = [want.logprobs.logprob, *(value for _, value in want.logprobs.top)]
        assert ours == pytest.approx(right, abs=1e-9)
