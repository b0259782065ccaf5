"""The plan's rounds of sampling give what the sampler of the PyTorch path gives for the same logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.model.constraint import mask_of
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import SamplingParams
from headrace.step.isa import Buffer
from headrace.step.oracle.order import RandomOrder
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.selection import Border
from tests.step.oracle.setting import (
    PARAMS,
    TIED,
    VOCABULARY,
    World,
    expected,
    model_of,
    same,
    shallow,
    tokens_of,
)


def agree(world: World, rows: list[LaunchRow], *, sms: int, order: RandomOrder | None = None) -> list[int]:
    """One step; the oracle's tokens and log-probabilities equal the sampler's, given the oracle's logits."""
    oracle = world.oracle(rows=16, sms=sms, order=order)
    [results] = oracle.launch(rows, 1)
    wanted = expected(torch.from_numpy(oracle.logits()[: len(rows)].copy()), rows)
    same(results, wanted)
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
    rows = [
        sequence.row(slot, one, seed=slot)
        for slot, (sequence, one) in enumerate(zip(world.sequences, TIED * 2, strict=True))
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
