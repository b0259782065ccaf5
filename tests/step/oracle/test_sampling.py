"""The plan's rounds of sampling give what the sampler of the PyTorch path gives for the same logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.model.config import ModelConfig
from headrace.model.constraint import mask_of
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import SamplingParams
from headrace.step.isa import Buffer
from headrace.step.oracle.order import RandomOrder
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.selection import Border
from tests.step.oracle.setting import VOCABULARY, World, expected, model_of, north, tokens_of


def shallow(seed: int = 0) -> ModelConfig:
    """One layer, so that sampling is what takes the time. Seeds tell configs, and so models, apart."""
    return replace(north(), layers=north().layers[:1], norm_eps=1e-6 * (1 + seed))


PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=5.0),
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


def agree(world: World, rows: list[LaunchRow], *, sms: int, order: RandomOrder | None = None) -> list[int]:
    """One step; the oracle's tokens and log-probabilities equal the sampler's, given the oracle's logits."""
    oracle = world.oracle(rows=16, sms=sms, order=order)
    [results] = oracle.launch(rows, 1)
    wanted = expected(torch.from_numpy(oracle.logits()[: len(rows)].copy()), rows)
    for result, want in zip(results, wanted, strict=True):
        assert result is not None
        assert result.token == want.token
        if want.logprobs is None:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        assert [token for token, _ in result.logprobs.top] == [token for token, _ in want.logprobs.top]
        values = [result.logprobs.logprob, *(value for _, value in result.logprobs.top)]
        others = [want.logprobs.logprob, *(value for _, value in want.logprobs.top)]
        assert values == pytest.approx(others, abs=1e-9)
    return [want.token for want in wanted]


@pytest.mark.parametrize("sms", [1, 2, 3, 7])
def test_every_parameter_beside_all_others(sms: int) -> None:
    world = World(shallow(), [30] * 16)
    every = list(PARAMS.values())
    seen: set[int] = set()
    for turn in range(2):
        params = (every * 2)[turn * 16 : turn * 16 + 16]
        rows = [
            sequence.row(slot, one, seed=100 * turn + slot)
            for slot, (sequence, one) in enumerate(zip(world.sequences, params, strict=True))
        ]
        seen.update(agree(world, rows, sms=sms, order=RandomOrder(sms + turn)))
    assert len(seen) > 8


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_by_itself(name: str) -> None:
    """Rounds that nobody needs are skipped; what remains must not lean on them."""
    world = World(shallow(), [40, 41])
    rows = [sequence.row(slot, PARAMS[name], seed=9) for slot, sequence in enumerate(world.sequences)]
    agree(world, rows, sms=3, order=RandomOrder(2))


@pytest.mark.parametrize("sms", [1, 3])
def test_ties_go_to_the_lowest_ids(sms: int) -> None:
    """The head repeats its rows, so that every logit comes many times, on many SMs."""
    config = shallow(seed=1)
    head = model_of(config).get_parameter("head.weight")
    head.copy_(head[torch.arange(VOCABULARY) % 9].clone())
    world = World(config, [30] * 12)
    kinds = [
        SamplingParams(temperature=0, logprobs=20),
        SamplingParams(top_k=5, temperature=3.0),
        SamplingParams(top_k=40, temperature=30.0),
        SamplingParams(top_p=0.3, temperature=3.0),
        SamplingParams(top_k=50, top_p=0.7, temperature=30.0),
        SamplingParams(top_p=0.01, temperature=1.0),
    ]
    params = kinds * 2
    rows = [
        sequence.row(slot, one, seed=slot)
        for slot, (sequence, one) in enumerate(zip(world.sequences, params, strict=True))
    ]
    agree(world, rows, sms=sms)


def test_forbidden_tokens_are_never_taken() -> None:
    world = World(shallow(), [30] * 4)
    allowed = mask_of([3, 4, 150, 299], VOCABULARY)
    kinds = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=4.0),
        SamplingParams(top_k=2, top_p=0.9),
        SamplingParams(logit_bias={7: 100.0}),
    ]
    rows = [
        sequence.row(slot, one, seed=slot, allowed=allowed)
        for slot, (sequence, one) in enumerate(zip(world.sequences, kinds, strict=True))
    ]
    assert set(agree(world, rows, sms=3)) <= {3, 4, 150, 299}


def test_penalties_count_what_the_launch_has_made() -> None:
    world = World(shallow(), [30])
    params = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.2)
    row = world.sequences[0].row(0, params)
    oracle = world.oracle(rows=1, sms=2)
    made = [tokens_of(results)[0] for results in oracle.launch([row], 6)]
    again: list[int] = []
    for step in range(6):
        fed = replace(
            row,
            token=again[-1] if again else row.token,
            position=row.position + step,
            output=[*row.output, *again],
        )
        again.append(expected(world.logits([fed]), [fed])[0].token)
    assert made == again
    assert len(set(again)) == 6  # a penalty of 2 for each time leaves no token twice here


def test_draws_differ_by_seed_and_position() -> None:
    world = World(shallow(), [30])
    hot = SamplingParams(temperature=30.0)
    rows = [world.sequences[0].row(0, hot, seed=seed) for seed in range(16)]
    assert len(set(agree(world, rows, sms=2))) > 8


@pytest.mark.parametrize("name", ["greedy", "plain", "all three", "logprobs"])
@pytest.mark.parametrize("cause", ["not a number", "nothing allowed"])
def test_a_row_whose_logits_are_no_numbers_ends_alone(name: str, cause: str) -> None:
    config = shallow(seed=2)
    model_of(config).get_parameter("embed.weight")[7] = torch.nan
    good, bad = (
        sequence.row(slot, PARAMS[name], seed=slot)
        for slot, sequence in enumerate(World(config, [30, 31]).sequences)
    )
    good = replace(good, token=9)
    if cause == "not a number":
        bad = replace(bad, token=7)
    else:
        bad = replace(bad, token=9, allowed=mask_of([], VOCABULARY))
    alone = list(World(config, [30, 31]).oracle(rows=1, sms=3).launch([good], 3))
    made = list(World(config, [30, 31]).oracle(rows=2, sms=3).launch([good, bad], 3))
    assert [step[0] for step in made] == [step[0] for step in alone]
    assert [step[1] for step in made] == [Sampled(NO_TOKEN), None, None]


def test_unneeded_rounds_leave_their_buffers_alone() -> None:
    world = World(shallow(), [30])
    oracle = world.oracle(rows=1, sms=2)
    list(oracle.launch([world.sequences[0].row(0, SamplingParams(top_p=0.9))], 1))
    ties = oracle.buffer(Buffer.TIES)
    assert (ties[0] < 0).all()  # poison
    assert (ties[1] >= 0).all()
    assert not oracle.buffer(Buffer.HISTOGRAM).any()  # cleared for the next step


def test_a_border_is_where_the_sum_from_the_top_arrives() -> None:
    border = Border(needed=5)
    keys = np.array([0xFF000000, 0xFE000001, 0xFE000000, 0x01000000], dtype=np.uint32)
    histogram = np.zeros(256, dtype=np.uint64)
    histogram[0xFF], histogram[0xFE], histogram[0x01] = 2, 3, 9
    border.settle(histogram)
    assert (border.prefix, border.above) == (0xFE, 2)
    assert border.inside(keys).tolist() == [False, True, True, False]
    assert border.next_digits(keys).tolist() == [0, 0, 0, 0]
