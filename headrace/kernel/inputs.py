"""What a launch is told of its rows, and how each is sampled: filled on the host, mirrored on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from headrace.kernel.history import History
from headrace.kernel.mirror import Mirror, device_bytes
from headrace.kernel.records import BIAS, ROW_INPUT, RowFlag
from headrace.model.constraint import mask_words
from headrace.step.isa import TILE_ROWS
from headrace.step.oracle.rows import LaunchRow

# Of all rows of a launch, at first; there is always room for more.
STOP_TOKENS = 4096
BIASES = 4096
_INT32 = np.dtype(np.int32)
_MOST = 2**31 - 1


class RowInputs:
    """The rows of a launch of up to `rows` rows, with their stop tokens, biases, masks and histories.

    Nothing is allocated for a launch, unless it is the first that needs an array or a longer one.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._shape, self._device = (rows, vocabulary), device
        self._rows = Mirror((rows,), ROW_INPUT, device)
        self._stops = Mirror((STOP_TOKENS,), _INT32, device)
        self._biases = Mirror((BIASES,), BIAS, device)
        self._masks: Mirror | None = None
        self._adjusted: torch.Tensor | None = None
        self._history = History(rows, vocabulary, device)
        self._lengths: dict[int, int] = {}
        self._masked: list[int] = []

    def fill(self, rows: Sequence[LaunchRow | None]) -> None:
        """Write down the rows."""
        self._rows.host[:] = np.zeros(1, ROW_INPUT)
        self._lengths.clear()
        self._masked.clear()
        stops: list[int] = []
        biases: list[tuple[int, float]] = []
        for index, row in enumerate(rows):
            if row is None:
                continue
            flags = flags_of(row, self._shape[1])
            if RowFlag.MASKED in flags:
                self._fill_mask(index, row)
            if RowFlag.COUNTED in flags:
                self._lengths[index] = len(row.output)
                if self._history.take(index, row):
                    flags |= RowFlag.UNCOUNTED
            self._rows.host[index] = record_of(row, flags, len(stops), len(biases))
            stops += sorted(row.stop_token_ids)
            biases += row.params.logit_bias.items()
            if flags & RowFlag.CHANGED and self._adjusted is None:
                padded = -(-self._shape[1] // TILE_ROWS) * TILE_ROWS
                self._adjusted = device_bytes(self._shape[0] * padded * 4, self._device)
        if len(stops) > len(self._stops.host):
            self._stops = Mirror((2 * len(stops),), _INT32, self._device)
        self._stops.host[: len(stops)] = stops
        if len(biases) > len(self._biases.host):
            self._biases = Mirror((2 * len(biases),), BIAS, self._device)
        self._biases.host[: len(biases)] = np.array(biases, dtype=BIAS)

    @property
    def searching(self) -> bool:
        """Whether any row's sampling searches for a border: if not, the launch leaves SAMPLE_SELECT out."""
        return bool((self._rows.host["flags"] & RowFlag.SEARCHED).any())

    def send(self) -> None:
        """Copy what was filled to the device, on the current stream."""
        self._rows.send()
        self._stops.send()
        if self._rows.host["bias_count"].any():
            self._biases.send()
        for index in self._masked:
            assert self._masks is not None
            self._masks.send_part(index)
        self._history.send()

    def addresses(self) -> dict[str, int]:
        """Of the arrays on the device, by their names in the kernel's argument."""
        return {
            "rows": self._rows.device.data_ptr(),
            "stop_tokens": self._stops.device.data_ptr(),
            "biases": self._biases.device.data_ptr(),
            "masks": self._masks.device.data_ptr() if self._masks is not None else 0,
            "history": self._history.address,
            "adjusted": self._adjusted.data_ptr() if self._adjusted is not None else 0,
        }

    def ran(self, rows: Sequence[LaunchRow | None], made: Sequence[Sequence[int]]) -> None:
        """Take note of the tokens that a launch has made of each row, in order."""
        for index, length in self._lengths.items():
            row = rows[index]
            assert row is not None
            self._history.ran(index, row, length, made[index])

    def forget(self) -> None:
        """Nothing that launches have left on the device may be relied on, as after one that failed."""
        self._history.forget()

    def _fill_mask(self, index: int, row: LaunchRow) -> None:
        if self._masks is None:
            self._masks = Mirror((self._shape[0], mask_words(self._shape[1])), _INT32, self._device)
        self._masks.host[index] = row.allowed
        self._masked.append(index)


def record_of(row: LaunchRow, flags: RowFlag, stop_first: int, bias_first: int) -> tuple[float, ...]:
    """The record of a row, as ROW_INPUT has its fields."""
    params = row.params
    numerator, denominator = params.top_p.as_integer_ratio()
    return (
        1,  # active
        row.slot,
        row.token,
        row.position,
        min(row.max_tokens, _MOST),
        stop_first,
        len(row.stop_token_ids),
        int(flags),
        row.seed % 2**64,
        numerator,
        denominator.bit_length() - 1,  # of a power of two
        params.top_k if RowFlag.TOP_K in flags else 0,
        params.temperature,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        bias_first,
        len(params.logit_bias),
        params.logprobs or 0,
    )


def flags_of(row: LaunchRow, vocabulary: int) -> RowFlag:
    """What sampling the row takes."""
    params, flags = row.params, RowFlag(0)
    if params.changes_logits or row.allowed is not None:
        flags |= RowFlag.CHANGED
    if params.needs_history:
        flags |= RowFlag.COUNTED
    if row.allowed is not None:
        flags |= RowFlag.MASKED
    if params.logprobs is not None:
        flags |= RowFlag.LOGPROBS
    if params.is_greedy:
        return flags
    flags |= RowFlag.DRAWN
    if 0 < params.top_k < vocabulary:
        flags |= RowFlag.TOP_K
    if params.top_p < 1.0:
        flags |= RowFlag.TOP_P
    return flags
