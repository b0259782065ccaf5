import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.model import philox
from tests.model.slow_sampler import slow_philox, slow_uniform
from tests.model.statistics import Floats, kolmogorov_smirnov

# Random123's kat_vectors file, the three lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]
LIMIT = 0.001
words = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers(line: str) -> None:
    numbers = [int(word, 16) for word in line.split()]
    arrays = [np.array([number], dtype=np.uint64) for number in numbers]
    tensors = [torch.tensor([number]) for number in numbers]
    assert [int(word[0]) for word in philox.philox4x32(arrays[:4], arrays[4:6])] == numbers[6:]
    assert [int(word[0]) for word in philox.philox4x32(tensors[:4], tensors[4:6])] == numbers[6:]
    assert slow_philox(numbers[:4], numbers[4:6]) == numbers[6:]


@given(st.lists(words, min_size=6, max_size=6))
def test_arrays_tensors_and_integers_agree(numbers: list[int]) -> None:
    arrays = [np.array([number], dtype=np.uint64) for number in numbers]
    tensors = [torch.tensor([number]) for number in numbers]
    expected = slow_philox(numbers[:4], numbers[4:])
    assert [int(word[0]) for word in philox.philox4x32(arrays[:4], arrays[4:])] == expected
    assert [int(word[0]) for word in philox.philox4x32(tensors[:4], tensors[4:])] == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**20))
def test_uniform_follows_the_documented_layout(seed: int, position: int, token: int) -> None:
    owners, tokens = torch.tensor([1, 0]), torch.tensor([token, token])
    values = philox.uniform([0, seed], [0, position], owners, tokens).tolist()
    assert values == [slow_uniform(seed, position, token), slow_uniform(0, 0, token)]


def test_whole_vocabulary_equals_single_tokens() -> None:
    seeds, positions, vocab_size = [3, 2**64 - 1, -1], [0, 5, 2**33 + 5], 1001
    every = philox.uniform_vocabulary(seeds, positions, vocab_size, torch.device("cpu"))
    owners = torch.arange(3).repeat_interleave(vocab_size)
    single = philox.uniform(seeds, positions, owners, torch.arange(vocab_size).repeat(3))
    assert every.dtype == torch.float32
    assert torch.equal(every, single.view(3, vocab_size))


@pytest.mark.parametrize("word", [0, 1, 2**23 - 1, 2**23, 2**24 - 1, 2**24 + 1, 2**31 + 255, 2**32 - 1])
def test_a_word_becomes_a_float_strictly_between_0_and_1(word: int) -> None:
    value = Fraction(philox._to_uniform(torch.tensor([word])).item())
    exact = Fraction(2 * word + 1, 2**33)
    assert 0 < value < 1
    assert value <= exact < value + value * Fraction(1, 2**23)
    assert philox.UNIFORM_MIN <= value <= philox.UNIFORM_MAX
    if word < 2**23:
        assert value == exact


def test_noise_at_the_ends_is_finite_and_within_a_hundred_thousandth_in_float32() -> None:
    values = torch.logspace(math.log2(philox.UNIFORM_MIN), 0, 200_001, base=2, dtype=torch.float64)
    values = values.to(torch.float32).clamp(philox.UNIFORM_MIN, philox.UNIFORM_MAX)
    exact = [philox.gumbel_exact(value) for value in values.tolist()]
    error = (philox.gumbel(values).to(torch.float64) - torch.tensor(exact, dtype=torch.float64)).abs()
    assert error.max() < 1e-5
    assert min(exact) == pytest.approx(-2.8, abs=0.05)
    assert max(exact) == pytest.approx(22.87, abs=0.01)


def sample_along(axis: str, count: int) -> Floats:
    """Uniform numbers that differ in one of seed, position and token id."""
    device = torch.device("cpu")
    if axis == "token":
        return philox.uniform_vocabulary([5], [9], count, device)[0].double().numpy()
    seeds = range(1000, 1000 + count) if axis == "seed" else [5] * count
    positions = range(1000, 1000 + count) if axis == "position" else [9] * count
    return philox.uniform_vocabulary(seeds, positions, 1, device)[:, 0].double().numpy()


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_uniform_along_every_axis(axis: str) -> None:
    values = sample_along(axis, 100_000)
    assert kolmogorov_smirnov(values) > LIMIT
    assert kolmogorov_smirnov(values**1.05) < LIMIT  # the test sees a skew of 5 %


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 256])
def test_neighbours_are_uncorrelated(axis: str, distance: int) -> None:
    values = sample_along(axis, 100_000)
    bound = 4 / math.sqrt(len(values) - distance)
    assert abs(np.corrcoef(values[:-distance], values[distance:])[0, 1]) < bound
    mixed = values[distance:] + 0.02 * values[:-distance]
    assert abs(np.corrcoef(values[:-distance], mixed)[0, 1]) > bound  # the test sees 2 % of a neighbour


def test_ties_for_the_lead_are_too_rare_to_see_in_a_large_vocabulary() -> None:
    tied, tied_at_24_bits = 0, 0
    for seed in range(0, 200, 4):
        values = philox.uniform_vocabulary(range(seed, seed + 4), [7] * 4, 262_144, torch.device("cpu"))
        best = values.amin(1, keepdim=True)
        tied += int((values == best).sum()) - 4
        coarse = (values * 2**24).floor()
        tied_at_24_bits += int((coarse == coarse.amin(1, keepdim=True)).sum()) - 4
    assert tied == 0  # expected in 0.012 of 200 rows
    assert tied_at_24_bits > 0  # expected in 3: the resolution that would not do
