import pickle
from collections import UserDict
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from headrace.model.sampling import MAX_STOPS, ParameterError, SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, NAN, INF, 1000.1, "1", None, True)),
    *(("top_k", value) for value in (-2, 1.5, "4", None, True)),
    *(("top_p", value) for value in (0, -0.5, 1.01, NAN, None)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, "0")),
    *(("seed", value) for value in (1.0, "1", True)),
    *(("repetition_penalty", value) for value in (0, -1, NAN, INF, 0.001, 101)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN)),
    *(("logit_bias", value) for value in ({1: 101}, {1: NAN}, {-1: 0}, {"1": 0}, {True: 0}, [1], None)),
    *(("stop", value) for value in ("", ["a", ""], [1], 5, None, ["a"] * (MAX_STOPS + 1))),
    *(("stop_token_ids", value) for value in ([-1], ["1"], "1", [1.0], 5, None)),
    *(("max_tokens", value) for value in (0, -1, 1.5, "3", True)),
    *(("logprobs", value) for value in (-1, 21, 2.0, True)),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name}: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 1000, 1000.0),
    ("top_k", -1, 0),
    ("top_p", 1e-9, 1e-9),
    ("min_p", 1, 1.0),
    ("seed", -1, 2**64 - 1),
    ("seed", 2**64 + 5, 5),
    ("logit_bias", {3: -100, 0: 100}, {3: -100.0, 0: 100.0}),
    ("logit_bias", UserDict({3: 1}), {3: 1.0}),
    ("stop", "END", ("END",)),
    ("stop", ["a", "b", "a"], ("a", "b", "a")),
    ("stop_token_ids", [2, 1], (2, 1)),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("max_tokens", 1, 1),
]


@pytest.mark.parametrize(("name", "value", "stored"), ACCEPTED)
def test_borders_are_accepted_and_normalised(name: str, value: Any, stored: Any) -> None:
    result = getattr(SamplingParams(**{name: value}), name)
    assert result == stored
    assert type(result) is type(stored)


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(ParameterError, match=r"above 0 and at most 1, not 1\.5"):
        SamplingParams(top_p=1.5)


def test_equal_parameters_hash_equally_and_survive_pickling() -> None:
    one = SamplingParams(stop=["a"], logit_bias={1: 2}, seed=3)
    other = SamplingParams(stop=("a",), logit_bias={1: 2.0}, seed=3 + 2**64)
    assert one == other
    assert hash(one) == hash(other)
    assert one != replace(one, logit_bias={1: 3})
    assert pickle.loads(pickle.dumps(one)) == one


def test_it_is_frozen_and_keeps_its_own_bias() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]


def test_kinds() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert not SamplingParams().is_filtered
    assert all(params.is_filtered for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.9)))
    assert SamplingParams(min_p=0.1).is_filtered
    assert not SamplingParams().changes_logits
    assert SamplingParams(logit_bias={1: 1}).changes_logits
    assert not SamplingParams(logit_bias={1: 1}).needs_history
    assert SamplingParams(repetition_penalty=1.1).needs_history
    assert SamplingParams(presence_penalty=-0.1).needs_history
    assert SamplingParams(frequency_penalty=0.1).needs_history


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    SamplingParams(logit_bias={99: 1}, stop_token_ids=[99]).check_vocabulary(100)
    with pytest.raises(ParameterError, match="logit_bias: token 100 does not exist"):
        SamplingParams(logit_bias={100: 1}).check_vocabulary(100)
    with pytest.raises(ParameterError, match="stop_token_ids: token 100 does not exist"):
        SamplingParams(stop_token_ids=[100]).check_vocabulary(100)
