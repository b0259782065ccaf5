import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model import filters, philox, sampler
from headrace.model.sampler import NO_TOKEN, Sampled, SampleRow, _lowest_argmax, sample
from headrace.model.sampling import SamplingParams
from tests.model.slow_sampler import GREEDY, row, slow_sample, tokens_of

# Against the slow twin. Logits on a coarse grid make ties, also at the borders of the filters.

logits_values = st.one_of(
    st.integers(-6, 6).map(float),
    st.floats(-30, 30, width=32),
    st.just(-math.inf),
)
parameters = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 9e-6, 1e-5, 0.7, 1.0]), st.floats(0.05, 5)),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.25, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, 3), st.floats(-100, 100), max_size=2),
    logprobs=st.sampled_from([None, 0, 1, 3, 20]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SampleRow]]:
    vocab_size = draw(st.integers(4, 24))
    history = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    lines, rows = [], []
    for _ in range(draw(st.integers(1, 4))):
        line = draw(st.lists(logits_values, min_size=vocab_size, max_size=vocab_size))
        line[draw(st.integers(0, vocab_size - 1))] = draw(st.floats(-30, 30, width=32))
        lines.append(line)
        seed, position = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**34))
        rows.append(SampleRow(draw(parameters), seed, position, draw(history), draw(history)))
    return lines, rows


def check_logprobs(logits: list[float], item: Sampled, count: int | None) -> None:
    if count is None:
        assert item.logprobs is None
        return
    assert item.logprobs is not None
    total = math.log(sum(math.exp(value - max(logits)) for value in logits)) + max(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]
    assert item.logprobs.token == item.token
    assert item.logprobs.logprob == pytest.approx(logits[item.token] - total, abs=1e-9)
    assert [token for token, _ in item.logprobs.top] == order
    expected = [logits[token] - total for token in order]
    assert [value for _, value in item.logprobs.top] == pytest.approx(expected, abs=1e-9)


@settings(max_examples=120)
@given(batches())
def test_every_row_is_what_the_slow_sampler_takes(batch: tuple[list[list[float]], list[SampleRow]]) -> None:
    lines, rows = batch
    logits = torch.tensor(lines, dtype=torch.float32)
    before = logits.clone()
    result = sample(logits, rows)
    assert torch.equal(logits, before)
    for line, one, item in zip(lines, rows, result, strict=True):
        assert item.token == slow_sample(line, one)
        check_logprobs(line, item, one.params.logprobs)
    for index, one in enumerate(rows):
        assert sample(logits[index : index + 1], [one]) == [result[index]]


def disagreements() -> int:
    """How many of 200 fixed rows, full of ties, are not what the slow sampler takes, in a batch or alone."""
    random = np.random.default_rng(8)
    lines = random.integers(-3, 3, (200, 20)).astype(np.float32)
    choices: dict[str, list[float]] = {"top_k": [0, 3], "top_p": [1.0, 0.6], "min_p": [0.0, 0.3]}
    choices |= {
        "temperature": [0.0, 1.0, 1.0],
        "repetition_penalty": [1.0, 1.5],
        "presence_penalty": [0.0, 1.0],
    }
    rows = []
    for number in range(200):
        fields: dict[str, Any] = {name: random.choice(values).item() for name, values in choices.items()}
        fields["top_k"] = int(fields["top_k"])
        history = random.integers(0, 20, 8).tolist()
        rows.append(
            row(
                SamplingParams(**fields),
                seed=number // 20,
                position=number,
                prompt=history[:4],
                output=history[4:],
            )
        )
    together = tokens_of(torch.from_numpy(lines), rows)
    wrong = 0
    for line, one, token in zip(lines, rows, together, strict=True):
        alone = tokens_of(torch.from_numpy(line[None]), [one])
        wrong += not (alone == [token] == [slow_sample(line.tolist(), one)])
    return wrong


TRUE_LARGEST = filters.largest


def highest_ids(scores: torch.Tensor, count: int) -> torch.Tensor:
    return len(scores) - 1 - TRUE_LARGEST(scores.flip(0), count)


def no_min_p(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return filters.kept(scores, replace(params, min_p=0.0))


def keyed_by_row(indices: Sequence[int], rows: Sequence[SampleRow]) -> tuple[list[int], list[int]]:
    return list(indices), [rows[index].position for index in indices]


def highest_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    return logits.amax(1), (logits.shape[1] - 1 - logits.flip(1).numpy().argmax(1)).tolist()


SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    "highest id on a tie": (sampler, "_best", highest_argmax),
    "highest ids at the border of top_k": (filters, "largest", highest_ids),
    "min_p forgotten": (sampler, "kept", no_min_p),
    "noise keyed by the place in the batch": (sampler, "_streams", keyed_by_row),
    "another key schedule": (philox, "_KEY_STEPS", (0x9E3779B9, 0xBB67AE87)),
    "only the most likely within reach": (sampler, "_OUT_OF_REACH", 0.0),
}


@pytest.mark.parametrize("name", [None, *SABOTAGES])
def test_the_comparison_sees_every_sabotage(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name is not None:
        monkeypatch.setattr(*SABOTAGES[name])
    assert (disagreements() > 0) == (name is not None)


def mixed_rows(count: int) -> list[SampleRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.1},
        {"temperature": 8.0, "top_k": 2000},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.95, "logprobs": 20},
        {"min_p": 0.001, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}},
    ]
    return [
        row(SamplingParams(**kinds[index % len(kinds)]), seed=index * 7, position=index, output=[7, index, 7])
        for index in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [2999, 49_152])
def test_a_row_is_the_same_to_the_bit_in_any_company(vocab_size: int) -> None:
    rows = mixed_rows(16)
    logits = 4 * torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(2))
    together = sample(logits, rows)
    assert [sample(logits[index : index + 1], [rows[index]])[0] for index in range(16)] == together
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = sample(logits[order], [rows[index] for index in order])
    assert shuffled == [together[index] for index in order]
    some = order[:5]
    assert sample(logits[some], [rows[index] for index in some]) == [together[index] for index in some]


def test_a_large_vocabulary_agrees_with_the_slow_sampler() -> None:
    logits = 4 * torch.randn(8, 3001, generator=torch.Generator().manual_seed(4))
    rows = mixed_rows(8)
    assert tokens_of(logits, rows) == [
        slow_sample(line, one) for line, one in zip(logits.tolist(), rows, strict=True)
    ]


@pytest.mark.gpu
def test_a_gpu_takes_the_same_tokens() -> None:
    logits = 4 * torch.randn(32, 262_144, generator=torch.Generator().manual_seed(6))
    rows = mixed_rows(32)
    here, there = sample(logits, rows), sample(logits.cuda(), rows)
    assert [item.token for item in there] == [item.token for item in here]
    for one, other in zip(here, there, strict=True):
        if one.logprobs and other.logprobs:
            assert other.logprobs.logprob == pytest.approx(one.logprobs.logprob, abs=1e-9)
            assert [token for token, _ in other.logprobs.top] == [token for token, _ in one.logprobs.top]
    assert [sample(logits[index : index + 1].cuda(), [rows[index]])[0] for index in range(32)] == there


def test_logits_may_come_from_inference_mode_or_carry_a_gradient() -> None:
    rows = mixed_rows(8)
    with torch.inference_mode():
        inference = torch.randn(8, 100, generator=torch.Generator().manual_seed(7))
    gradient = inference.clone().requires_grad_()
    assert sample(inference, rows) == sample(gradient, rows)


# Greedy and errors.


def test_the_lowest_id_wins_a_tie_wherever_it_is() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(0, 50, (64, 5003), generator=generator).float()
    expected = [line.index(max(line)) for line in logits.tolist()]
    assert tokens_of(logits, [row()] * 64) == expected
    assert _lowest_argmax(logits).tolist() == expected


def test_other_devices_put_nan_where_it_is_seen() -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0], [math.nan, 0.0, math.nan]])
    assert _lowest_argmax(logits).tolist() == [1, 0]


def test_a_masked_token_is_never_taken() -> None:
    logits = torch.full((3, 40), -math.inf)
    logits[:, 17] = -5.0
    params = [GREEDY, SamplingParams(), SamplingParams(top_k=5, top_p=0.9)]
    assert tokens_of(logits, [row(one) for one in params]) == [17, 17, 17]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=3)])
def test_unusable_logits_give_no_token_and_leave_the_other_rows_theirs(
    value: float, params: SamplingParams
) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    others = [row(params, seed=1), row(params, seed=2)]
    expected = sample(logits[[0, 2]], others)
    logits[1, 30] = value
    asking = row(replace(params, logprobs=2))
    assert sample(logits, [others[0], asking, others[1]]) == [expected[0], Sampled(NO_TOKEN), expected[1]]
    assert sample(torch.full((1, 4), -math.inf), [row(params)]) == [Sampled(NO_TOKEN)]


@pytest.mark.parametrize("logits", [torch.zeros(2, 4).double(), torch.zeros(3, 4), torch.zeros(2)])
def test_logits_that_do_not_fit_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="needs float32 logits"):
        sample(logits, [row()] * 2)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 4), []) == []
