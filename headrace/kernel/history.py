"""What penalties look at: how often each token has come, for each place of a launch.

A place that goes on with the sequence of the launch before needs nothing new: the kernel has counted what it
made, all but the last token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernel.mirror import Mirror
from headrace.step.oracle.rows import LaunchRow


@dataclass(slots=True)
class _Counted:
    """What the device knows of a place: this prompt, and `length` tokens of output but for the last."""

    prompt: Sequence[int]  # the very object: while it is held, no other can pass for it
    length: int
    last: int


class History:
    """Counts on the device: int32 [rows, vocabulary], allocated when a row first needs them.

    An entry is twice the token's count in the output, plus one if it is in the prompt.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._shape = (rows, vocabulary)
        self._device = device
        self._mirror: Mirror | None = None
        self._counted: dict[int, _Counted] = {}
        self._fresh: list[int] = []

    @property
    def address(self) -> int:
        """Of the counts on the device; 0 before a row has needed them."""
        return self._mirror.device.data_ptr() if self._mirror is not None else 0

    def take(self, index: int, row: LaunchRow) -> bool:
        """Prepare a place for a row. Gives whether the kernel has yet to count the token that it is fed."""
        counted = self._counted.pop(index, None)
        if (
            counted is not None
            and counted.prompt is row.prompt
            and counted.length == len(row.output)
            and counted.last == row.token
        ):
            return True
        if self._mirror is None:
            self._mirror = Mirror(self._shape, np.dtype(np.int32), self._device)
        self._mirror.host[index] = counts(row.prompt, row.output, self._shape[1])
        self._fresh.append(index)
        return False

    def send(self) -> None:
        """Copy what is new to the device, on the current stream."""
        for index in self._fresh:
            assert self._mirror is not None
            self._mirror.send_part(index)
        self._fresh.clear()

    def ran(self, index: int, row: LaunchRow, length: int, made: Sequence[int]) -> None:
        """Note what a launch made of a row whose output was `length` tokens long before it."""
        if made:
            self._counted[index] = _Counted(row.prompt, length + len(made), made[-1])

    def forget(self) -> None:
        """Nothing on the device may be relied on."""
        self._counted.clear()
        self._fresh.clear()


def counts(prompt: Sequence[int], output: Sequence[int], vocabulary: int) -> npt.NDArray[np.int32]:
    """The entries of one row: int32 [vocabulary]."""
    entries = 2 * np.bincount(_ids(output), minlength=vocabulary).astype(np.int32)
    entries[_ids(prompt)] |= 1
    return np.asarray(entries, dtype=np.int32)


def _ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(array("q", tokens), dtype=np.int64)
