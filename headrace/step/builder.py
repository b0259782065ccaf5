"""Writes descriptors, one operation on all SMs at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.step.balance import Ints, places, settle, starts
from headrace.step.isa import UNIT, USED, WORDS, Field, Opcode
from headrace.step.machine import Machine
from headrace.step.plan import Words
from headrace.step.sizes import Sizes
from headrace.step.weights import Matrix


@dataclass(frozen=True, slots=True)
class Wait:
    """A counter and what a step adds to it; the empty wait passes at once."""

    counter: int = 0
    arrivals: int = 0


@dataclass(frozen=True, slots=True)
class Ranges:
    """Tiles [first, first + count) of every SM; int64 [SMs] each."""

    first: Ints
    count: Ints

    @staticmethod
    def of(counts: Ints) -> Ranges:
        return Ranges(starts(counts), counts)

    def within(self, low: int, high: int) -> Ranges:
        """The part of every range that lies in [low, high)."""
        first = np.clip(self.first, low, high)
        return Ranges(first, np.clip(self.first + self.count, low, high) - first)


Values = dict[str, int | Ints | Wait]  # fields of a descriptor by lower-case name


class Builder:
    """Collects the lists. `loads` are bytes that every SM has read so far, for balancing (see `balance`)."""

    def __init__(self, sizes: Sizes, machine: Machine) -> None:
        self.sizes = sizes
        self.machine = machine
        self.loads: Ints = np.zeros(sizes.sms, dtype=np.int64)
        self.counters: list[str] = ["none"]
        self._lengths = np.zeros(sizes.sms, dtype=np.int64)
        self._waves: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Words]] = []

    def counter(self, name: str) -> int:
        """A new counter."""
        self.counters.append(name)
        return len(self.counters) - 1

    def add(self, opcode: Opcode, where: npt.NDArray[np.bool_] | None, **values: int | Ints | Wait) -> None:
        """One task on every SM in `where` (all if None), with fields by lower-case name; arrays are [SMs].

        A Wait fills two fields: `wait=`, `second=` and `loader=`.
        """
        chosen = np.arange(self.sizes.sms) if where is None else np.flatnonzero(where)
        words = np.zeros((len(chosen), WORDS), dtype=np.int32)
        words[:, Field.OPCODE] = opcode
        for name, value in values.items():
            if isinstance(value, Wait):
                words[:, Field[f"{name}_counter".upper()]] = value.counter
                words[:, Field[f"{name}_arrivals".upper()]] = value.arrivals
            else:
                words[:, Field[name.upper()]] = value[chosen] if isinstance(value, np.ndarray) else value
        if Field.IN_FLIGHT in USED[opcode]:
            most = (words[:, Field.TILE_COUNT] * words[:, Field.PAGES_PER_TILE]).max(initial=0)
            words[:, Field.IN_FLIGHT] = self.machine.in_flight_of(opcode, self.sizes.rows, int(most))
        self._waves.append((chosen, self._lengths[chosen], words))
        self._lengths[chosen] += 1

    def tiled(self, opcode: Opcode, ranges: Ranges, **values: int | Ints | Wait) -> None:
        """A task on every SM whose range is not empty; if it signals, then how many tiles it has."""
        if "signal_counter" in values:
            values["signal_amount"] = ranges.count
        self.add(opcode, ranges.count > 0, first_tile=ranges.first, tile_count=ranges.count, **values)

    def gemm(self, opcode: Opcode, ranges: Ranges, matrix: Matrix, **values: int | Ints | Wait) -> None:
        """A tiled task with the pages of its range of a matrix."""
        self.tiled(
            opcode,
            ranges,
            **pages(matrix),
            weights=matrix.offset + ranges.first * matrix.tile_units,
            **values,
        )

    def read(self, amounts: Ints) -> None:
        """Add to the bytes that the SMs have read."""
        self.loads = settle(self.loads + amounts, self.machine.ring_bytes)

    def shares(self, sizes: Ints) -> Ints:
        """A share for every SM, the larger for those that have read less; `sizes` are bytes of the shares."""
        chosen = places(sizes, self.loads)
        self.read(sizes[chosen])
        return chosen

    def descriptors(self) -> Words:
        """The lists, int32 [SMs, longest + 1, WORDS]: each ends in END."""
        out = np.zeros((self.sizes.sms, int(self._lengths.max()) + 1, WORDS), dtype=np.int32)
        for chosen, index, words in self._waves:
            out[chosen, index] = words
        return out


def pages(matrix: Matrix) -> dict[str, int]:
    """The fields that say how a matrix is cut into pages."""
    return {"k": matrix.k, "pages_per_tile": matrix.pages_per_tile, "page_bytes": matrix.page_bytes}


def tile_bytes(matrix: Matrix) -> int:
    """Bytes of one tile."""
    return matrix.tile_units * UNIT
