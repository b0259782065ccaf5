"""Dividing tiles among SMs so that none has more bytes to read than need be, step segment after segment.

A step is a chain of segments with a grid-wide wait between them. An SM that has little to read in one segment
gets ahead, but only as far as its ring reaches. So loads are kept as bytes read so far, and one that
lies further behind the largest than a ring holds is lifted to there: that lead cannot be used later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def divide(total: int, weight: int, loads: Ints, caps: Ints) -> Ints:
    """How many of `total` tiles of `weight` bytes each SM takes, at most `caps`, to level `loads` out.

    The level is the lowest to which all tiles fit; what rounding leaves over goes to the least loaded, and
    among equals to the first.
    """
    if int(caps.sum()) < total:
        raise ValueError(f"{total} tiles do not fit into caps of {caps.sum()}")
    low, high = int(loads.min()), int(loads.max()) + (total + 1) * weight
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if int(_filled(middle, weight, loads, caps).sum()) > total else (middle, high)
        )
    counts = _filled(low, weight, loads, caps)
    while (left := total - int(counts.sum())) > 0:
        room = np.flatnonzero(counts < caps)
        order = room[np.argsort((loads + counts * weight)[room], kind="stable")]
        counts[order[:left]] += 1
    return counts


def _filled(level: int, weight: int, loads: Ints, caps: Ints) -> Ints:
    return np.asarray(np.clip((level - loads) // weight, 0, caps), dtype=np.int64)


def evenly(total: int, sms: int) -> Ints:
    """`total` tiles over SMs, as share_of divides them."""
    edges = np.arange(sms + 1, dtype=np.int64) * total // sms
    return np.diff(edges)


def starts(counts: Ints) -> Ints:
    """The first tile of every SM when all take theirs in order."""
    return np.cumsum(counts) - counts


def settle(loads: Ints, ring_bytes: int) -> Ints:
    """The loads as they count for what follows: nobody is more than a ring ahead of the last."""
    return np.asarray(np.maximum(loads, loads.max() - ring_bytes), dtype=np.int64)


def places(sizes: Ints, loads: Ints) -> Ints:
    """Which share each SM takes, when share s will read `sizes[s]` bytes: large shares to small loads."""
    shares = np.empty_like(loads)
    shares[np.argsort(loads, kind="stable")] = np.argsort(-sizes, kind="stable")
    return shares
