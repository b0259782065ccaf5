"""How often each token comes: frequencies against the stated distribution.

Each test also has to see a sampler that is wrong in one way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.model import philox
from headrace.model.sampling import SamplingParams
from tests.model.slow_sampler import probabilities, row, tokens_of
from tests.model.statistics import chi_square, independence

Counts = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]
LIMIT = 0.001  # a right sampler's p-value lies above, with the fixed seeds below; a wrong one's far below
CERTAIN = 1e-5

LOGITS = [1.2, -0.4, 2.1, 0.3, 2.0, -1.5, 0.9, -3.0, 1.1, 0.0, -0.7, 1.6]
DRAWS = 4_000
HISTORY: dict[str, Any] = {"prompt": [2, 4, 4], "output": [0, 2, 2, 2, 11]}


def draws(params: SamplingParams, seeds: Sequence[int], positions: Sequence[int]) -> Tokens:
    logits = torch.tensor([LOGITS]).expand(len(seeds), -1)
    rows = [
        row(params, seed=seed, position=position, **HISTORY)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return np.array(tokens_of(logits, rows))


def frequencies(params: SamplingParams) -> Counts:
    """How often each token comes: 100 neighbouring positions of each of 100 seeds."""
    seeds = [seed for seed in range(DRAWS // 100) for _ in range(100)]
    positions = [position for _ in range(DRAWS // 100) for position in range(100)]
    return np.bincount(draws(params, seeds, positions), minlength=len(LOGITS))


def expected(params: SamplingParams) -> npt.NDArray[np.float64]:
    return probabilities(LOGITS, row(params, **HISTORY)) * DRAWS


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.25},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {7: 4.0, 2: -3.0}},
    {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.0},
    },
]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_frequencies_follow_the_stated_distribution(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    counts = frequencies(params)
    assert chi_square(counts, expected(params)) > LIMIT
    # What the test would say of a sampler with half the temperature, which filters in its own way too.
    colder = replace(params, temperature=params.temperature / 2)
    assert chi_square(counts, expected(colder)) < CERTAIN


def test_a_temperature_wrong_by_5_percent_is_seen_in_more_draws() -> None:
    count = 60_000
    counts = np.bincount(draws(SamplingParams(), [3] * count, range(count)), minlength=len(LOGITS))
    assert chi_square(counts, count / DRAWS * expected(SamplingParams())) > LIMIT
    assert chi_square(counts, count / DRAWS * expected(SamplingParams(temperature=1.05))) < CERTAIN


def without(counts: Counts, token: int) -> Counts:
    """The counts of a sampler that never takes `token` and is right otherwise."""
    remaining = counts.copy()
    remaining[token] = 0
    return np.asarray(remaining * DRAWS // remaining.sum())


def test_a_top_p_that_drops_the_crossing_token_is_seen() -> None:
    params = SamplingParams(top_p=0.8)
    counts = frequencies(params)
    crossing = min(np.flatnonzero(expected(params)), key=lambda token: LOGITS[token])
    assert chi_square(counts, expected(params)) > LIMIT
    assert chi_square(without(counts, int(crossing)), expected(params)) < CERTAIN


def test_a_min_p_before_top_p_is_seen() -> None:
    params = SamplingParams(top_p=0.7, min_p=0.5)
    counts = frequencies(params)
    # min_p first leaves top_p a smaller whole, so that it reaches its share with fewer tokens.
    weights = np.exp(np.array(LOGITS))
    weights[weights < 0.5 * weights.max()] = 0
    order = np.argsort(-weights)
    run = int(np.searchsorted(weights[order].cumsum(), 0.7 * weights.sum())) + 1
    weights[order[run:]] = 0
    assert chi_square(counts, expected(params)) > LIMIT
    assert chi_square(counts, DRAWS * weights / weights.sum()) < CERTAIN


def test_a_penalty_on_the_prompt_by_mistake_is_seen() -> None:
    params = SamplingParams(presence_penalty=1.0)
    mistaken = row(params, prompt=[], output=HISTORY["prompt"] + HISTORY["output"])
    counts = frequencies(params)
    assert chi_square(counts, expected(params)) > LIMIT
    assert chi_square(counts, DRAWS * probabilities(LOGITS, mistaken)) < CERTAIN


Keying = Callable[[int, int], tuple[int, int]]
KEYINGS: dict[str, Keying] = {
    "as documented": lambda seed, position: (seed, position),
    "position ignored": lambda seed, position: (seed, 0),
    "seed ignored": lambda seed, position: (0, position),
    "seed and position added": lambda seed, position: (seed + position, 0),
}


@pytest.mark.parametrize("name", KEYINGS)
def test_neighbouring_seeds_and_positions_draw_independently(name: str) -> None:
    def drawn(seed_step: int, position_step: int) -> Tokens:
        keys = [KEYINGS[name](10 * number + seed_step, 7 * number + position_step) for number in range(DRAWS)]
        return draws(SamplingParams(temperature=3.0), [key[0] for key in keys], [key[1] for key in keys])

    here, right, below = drawn(0, 0), drawn(0, 1), drawn(1, 0)
    worst = min(independence(*pair, len(LOGITS)) for pair in ((here, right), (here, below), (right, below)))
    if name == "as documented":
        assert worst > LIMIT
    else:
        assert worst < CERTAIN


def test_a_draw_is_repeatable_and_the_seed_counts_modulo_2_64() -> None:
    logits = torch.zeros(4, 1000)
    seeds = [7, 7, 7 + 2**64, 8]
    taken = tokens_of(logits, [row(SamplingParams(), seed=seed) for seed in seeds])
    assert taken[0] == taken[1] == taken[2] != taken[3]
    assert tokens_of(logits[:1], [row(SamplingParams(), seed=7)]) == taken[:1]


def test_a_flat_large_vocabulary_is_drawn_evenly() -> None:
    vocab_size, parts, count = 262_144, 4, 128
    logits = torch.zeros(1, vocab_size).expand(8, -1)
    taken: list[int] = []
    coarse: list[int] = []
    for start in range(0, count, 8):
        seeds = range(start, start + 8)
        taken += tokens_of(logits, [row(SamplingParams(), seed=seed) for seed in seeds])
        if start < count / 4:  # uniforms of 16 bits: four tokens or so share the lead, and low ids win
            values = philox.uniform_vocabulary(seeds, [5] * 8, vocab_size, torch.device("cpu"))
            coarse += (values * 2**16).floor().numpy().argmin(1).tolist()
    for tokens, right in ((taken, True), (coarse, False)):
        counts = np.bincount(np.array(tokens) * parts // vocab_size, minlength=parts)
        p_value = chi_square(counts, np.full(parts, len(tokens) / parts))
        assert p_value > LIMIT if right else p_value < CERTAIN
