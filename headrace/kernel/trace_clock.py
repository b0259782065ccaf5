"""One time for a launch's record: SMs have clocks of their own, and these do not go alike.

Two anchors, at a launch's beginning and end, tell how an SM's cycles go with a timer that all share. In
between clocks drift: on an H200 by tens of microseconds over the tenth of a second that a launch takes, some
groups of SMs otherwise than others. But every layer all SMs wait for the same counters, and who waits sees
that one is complete within a poll, a microsecond at most. So these moments are made to agree, and all others
go with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.step.isa import Field
from headrace.step.plan import Plan

Times = npt.NDArray[np.float64]

_HALF = 1 << 31  # cycles: a launch takes far less, so that a difference has a sign
_WAITED = 0.05  # microseconds: an input waited for no longer than this was there already
_MOST = 0.75  # of all SMs must have waited for what they are compared by, and no fewer than _LEAST
_LEAST = 3
_SMOOTH = 5  # hops, whose median is taken: a single one has a poll's uncertainty


class Clock:
    """From every SM's cycles to microseconds, by its anchors: TRACE_ANCHOR [SMs, 2]."""

    def __init__(self, anchors: npt.NDArray[np.void]) -> None:
        first, last = anchors[:, 0], anchors[:, 1]
        elapsed = (last["cycles"] - first["cycles"]).astype(np.float64)  # modulo 2^32
        self.rate = (last["nanoseconds"] - first["nanoseconds"]).astype(np.float64) / elapsed / 1e3
        origin = first["nanoseconds"].min()
        self._cycles = first["cycles"]
        self._begin = (first["nanoseconds"] - origin).astype(np.float64) / 1e3

    def moments(self, cycles: npt.NDArray[np.uint32]) -> Times:
        """Of [SMs, ...] clock readings."""
        since = (cycles - _spread(self._cycles, cycles) + np.uint32(_HALF)).astype(np.int64) - _HALF
        return np.asarray(_spread(self._begin, cycles) + since * _spread(self.rate, cycles))

    def spans(self, cycles: npt.NDArray[np.uint32]) -> Times:
        """Of [SMs, ...] differences."""
        return np.asarray(cycles * _spread(self.rate, cycles))


def _spread(values: npt.NDArray[Any], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One value an SM, in as many dimensions as `like` has."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


class Corrections:
    """What has to be taken from each SM's times, from what its consumers have `seen` after waits (`inputs`).

    Both are [SMs, steps, tasks] in microseconds, NaN where there was no task.
    """

    def __init__(self, plan: Plan, seen: Times, inputs: Times) -> None:
        sms = len(seen)
        waited = np.where(np.nan_to_num(inputs) > _WAITED, seen, np.nan)
        hops = [
            _first_seen(waited[:, step], plan.descriptors[..., Field.WAIT_COUNTER] == counter)
            for step in range(seen.shape[1])
            for counter in range(1, len(plan.counters))
        ]
        common = [hop for hop in hops if np.isfinite(hop).sum() >= max(_LEAST, _MOST * sms)]
        self._known: list[tuple[Times, Times]] = []  # of every SM: when, and how far from the middle one
        if not common:
            return
        table = np.array(sorted(common, key=lambda hop: float(np.nanmedian(hop))))
        middle = np.nanmedian(table, axis=1)
        for sm in range(sms):
            there = np.isfinite(table[:, sm])
            away = _smoothed((table[:, sm] - middle)[there])
            self._known.append((table[there, sm], away))

    def of_sms(self, times: Times) -> Times:
        """Of [SMs, ...] moments."""
        return np.stack([self._of_one(sm, values) for sm, values in enumerate(times)])

    def of(self, sm: npt.NDArray[np.int64], times: Times) -> Times:
        """Of moments of the SMs that are named beside them."""
        found = times.copy()
        for one in np.unique(sm):
            found[sm == one] = self._of_one(int(one), times[sm == one])
        return found

    def _of_one(self, sm: int, times: Times) -> Times:
        if not self._known or not len(self._known[sm][0]):
            return times
        return np.asarray(times - np.interp(times, *self._known[sm]))


def _first_seen(waited: Times, mine: npt.NDArray[np.bool_]) -> Times:
    """When each SM's first task among its own that waited saw its inputs: [SMs], NaN if none did."""
    found = np.where(mine, waited, np.inf)
    found[np.isnan(found)] = np.inf
    first = found.min(axis=1)
    return np.where(np.isfinite(first), first, np.nan)


def _smoothed(values: Times) -> Times:
    """The median of every value and its neighbours."""
    half = min(_SMOOTH, len(values)) // 2
    padded = np.pad(values, half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.asarray(np.median(windows, axis=1))
