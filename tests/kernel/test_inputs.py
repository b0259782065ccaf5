"""How the rows of a launch are written for the kernel, and what is known of them from launch to launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernel.history import History, counts
from headrace.kernel.inputs import BIASES, STOP_TOKENS, RowInputs, flags_of, record_of
from headrace.kernel.records import BIAS, LOGPROB_RECORD, ROW_INPUT, RowFlag, flags, struct
from headrace.model.constraint import mask_of
from headrace.model.sampling import SamplingParams
from headrace.step.oracle.rows import LaunchRow

VOCABULARY = 300
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
COUNTING = SamplingParams(temperature=0, frequency_penalty=0.5)


def row(params: SamplingParams = GREEDY, **fields: Any) -> LaunchRow:
    given: dict[str, Any] = {"slot": 2, "token": 7, "position": 5, "tables": {}}
    return LaunchRow(params=params, **(given | fields))


def inputs(rows: int = 4) -> RowInputs:
    return RowInputs(rows, VOCABULARY, CPU)


def records(filled: RowInputs) -> Any:
    """The rows as the device has them after `send`."""
    filled.send()
    return filled._rows.device.numpy().view(ROW_INPUT)


def test_a_row_is_written_field_by_field() -> None:
    params = SamplingParams(
        temperature=0.75,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={3: 1.5, 9: -2.0},
        logprobs=4,
    )
    filled = inputs()
    given = row(params, seed=2**64 - 3, max_tokens=11, stop_token_ids=frozenset({5, 1}))
    filled.fill([row(stop_token_ids=frozenset({8})), None, given])
    one = records(filled)[2]
    plain = {
        "active": 1,
        "slot": 2,
        "token": 7,
        "position": 5,
        "max_tokens": 11,
        "stop_first": 1,
        "stop_count": 2,
        "seed": 2**64 - 3,
        "top_k": 40,
        "temperature": 0.75,
        "min_score": np.float32(math.log(0.05)),
        "repetition": 1.25,
        "presence": 0.5,
        "frequency": -0.25,
        "bias_first": 0,
        "bias_count": 2,
        "logprobs": 4,
    }
    assert {name: one[name] for name in plain} == plain
    assert int(one["top_p_numerator"]) / 2 ** int(one["top_p_shift"]) == 0.9
    everything = RowFlag(sum(RowFlag)) & ~(RowFlag.MASKED | RowFlag.UNCOUNTED)
    assert RowFlag(int(one["flags"])) == everything
    assert filled._stops.device.numpy().view(np.int32)[:3].tolist() == [8, 1, 5]
    assert filled._biases.device.numpy().view(BIAS)[:2].tolist() == [(3, 1.5), (9, -2.0)]
    assert records(filled)["active"].tolist() == [1, 0, 1, 0]


def test_a_plain_row_asks_for_nothing() -> None:
    filled = inputs()
    filled.fill([row()])
    assert records(filled)["flags"].tolist() == [0] * 4
    addresses = filled.addresses()
    assert addresses["masks"] == addresses["history"] == addresses["adjusted"] == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), RowFlag.DRAWN),
        (SamplingParams(top_k=VOCABULARY), RowFlag.DRAWN),
        (SamplingParams(top_k=VOCABULARY - 1), RowFlag.DRAWN | RowFlag.TOP_K),
        (SamplingParams(top_p=0.5), RowFlag.DRAWN | RowFlag.TOP_P),
        (SamplingParams(temperature=0, top_k=3, top_p=0.5), RowFlag(0)),
        (SamplingParams(temperature=0, logprobs=0), RowFlag.LOGPROBS),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}), RowFlag.CHANGED),
        (SamplingParams(temperature=0, presence_penalty=1.0), RowFlag.CHANGED | RowFlag.COUNTED),
    ],
)
def test_flags_say_what_a_row_needs_and_no_more(params: SamplingParams, expected: RowFlag) -> None:
    assert flags_of(row(params), VOCABULARY) == expected
    masked = row(params, allowed=mask_of([1], VOCABULARY))
    assert flags_of(masked, VOCABULARY) == expected | RowFlag.CHANGED | RowFlag.MASKED


def test_a_length_without_end_fits_the_record() -> None:
    record = np.array([record_of(row(max_tokens=2**40), RowFlag(0), 0, 0)], dtype=ROW_INPUT)
    assert record["max_tokens"][0] == 2**31 - 1


def test_masks_go_to_their_rows() -> None:
    filled, mask = inputs(), mask_of([0, 31, 32, 299], VOCABULARY)
    filled.fill([row(), row(allowed=mask)])
    filled.send()
    assert filled._masks is not None
    assert filled._masks.device.numpy().view(np.int32).reshape(4, -1)[1].tolist() == mask.tolist()
    assert filled.addresses()["masks"] == filled._masks.device.data_ptr()


def test_more_biases_than_there_was_room_for_get_it() -> None:
    vocabulary = BIASES + 10
    filled = RowInputs(2, vocabulary, CPU)
    bias = {token: float(token % 7) for token in range(BIASES + 5)}
    filled.fill([row(SamplingParams(logit_bias={1: 2.0})), row(SamplingParams(logit_bias=bias))])
    assert records(filled)["bias_first"].tolist() == [0, 1]
    sent = filled._biases.device.numpy().view(BIAS)
    assert sent[1 : 1 + len(bias)]["token"].tolist() == list(bias)
    assert filled.addresses()["biases"] == filled._biases.device.data_ptr()


def test_more_stop_tokens_than_there_was_room_for_get_it() -> None:
    filled = inputs()
    filled.fill([row(stop_token_ids=frozenset({7})), row(stop_token_ids=frozenset(range(STOP_TOKENS)))])
    assert records(filled)["stop_first"].tolist() == [0, 1, 0, 0]
    assert records(filled)["stop_count"].tolist() == [1, STOP_TOKENS, 0, 0]
    sent = filled._stops.device.numpy().view(np.int32)
    assert sent[: 1 + STOP_TOKENS].tolist() == [7, *range(STOP_TOKENS)]
    assert filled.addresses()["stop_tokens"] == filled._stops.device.data_ptr()


def test_counts_are_twice_the_output_and_one_for_the_prompt() -> None:
    entries = counts([3, 3, 4], [4, 5, 5, 5], 8)
    assert entries.tolist() == [0, 0, 0, 1, 3, 6, 0, 0]
    assert counts([], [], 3).tolist() == [0, 0, 0]


def history_of(filled: RowInputs, index: int) -> Any:
    mirror = filled._history._mirror
    assert mirror is not None
    return mirror.device.numpy().view(np.int32).reshape(-1, VOCABULARY)[index]


class Sequences:
    """A sequence whose launches are played by a kernel that counts as the real one does."""

    def __init__(self) -> None:
        self.prompt, self.output = [1, 2, 3], [7]

    def row(self) -> LaunchRow:
        return row(COUNTING, token=self.output[-1], prompt=self.prompt, output=self.output)

    def launch(self, filled: RowInputs, made: Sequence[int], place: int = 1) -> bool:
        """Whether its tokens had to be counted anew."""
        rows: list[LaunchRow | None] = [None] * 4
        rows[place] = self.row()
        filled.fill(rows)
        one = records(filled)[place]
        counted = history_of(filled, place)
        fed = [self.output[-1], *made]
        uncounted = bool(RowFlag(int(one["flags"])) & RowFlag.UNCOUNTED)
        for step, token in enumerate(fed[:-1]):
            if step or uncounted:
                counted[token] += 2
        self.output += made
        given: list[list[int]] = [[] for _ in rows]
        given[place] = list(made)
        filled.ran(rows, given)
        wanted = counts(self.prompt, self.output[:-1], VOCABULARY)
        np.testing.assert_array_equal(counted, wanted)
        return not uncounted


def test_a_sequence_that_goes_on_is_counted_once() -> None:
    filled, sequence = inputs(), Sequences()
    assert sequence.launch(filled, [8, 8, 9])
    assert not sequence.launch(filled, [9])
    assert not sequence.launch(filled, [7, 7])


def test_another_sequence_in_the_place_is_counted_anew() -> None:
    filled, first, second = inputs(), Sequences(), Sequences()
    first.launch(filled, [8])
    second.output = list(first.output)  # the same tokens, but nobody says so
    assert second.launch(filled, [8])
    assert first.launch(filled, [5], place=2)
    assert not second.launch(filled, [6])


def test_tokens_from_elsewhere_are_counted_anew() -> None:
    filled, sequence = inputs(), Sequences()
    sequence.launch(filled, [8])
    sequence.output.append(4)
    assert sequence.launch(filled, [5])


def test_after_a_failed_launch_nothing_is_relied_on() -> None:
    filled, sequence = inputs(), Sequences()
    sequence.launch(filled, [8])
    filled.forget()
    assert sequence.launch(filled, [5])
    filled.fill([None, sequence.row()])  # and never heard of again
    assert sequence.launch(filled, [5])


def test_history_is_sent_only_where_it_is_new() -> None:
    history = History(2, VOCABULARY, CPU)
    assert history.address == 0
    assert not history.take(0, row(COUNTING, prompt=[1], output=[7]))
    history.send()
    mirror = history._mirror
    assert mirror is not None
    assert history.address == mirror.device.data_ptr()
    mirror.device.zero_()
    history.send()
    assert not mirror.device.any()


def test_records_become_structs_with_arrays_and_flags_constants() -> None:
    text = "".join(struct("LogprobRecord", LOGPROB_RECORD))
    assert "float top_raw[20];" in text
    assert "static_assert(sizeof(LogprobRecord) == 176);" in text
    assert "constexpr int32_t UNCOUNTED = 128;" in "".join(flags("row_flag", RowFlag))
    assert len({int(flag) for flag in RowFlag}) == len(RowFlag)
