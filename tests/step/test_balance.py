"""Dividing static work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.step.balance import divide, evenly, places, settle, starts

loads = st.lists(st.integers(0, 100), min_size=1, max_size=20).map(np.array)


@given(loads=loads, total=st.integers(0, 200), weight=st.integers(1, 30), data=st.data())
def test_nobody_could_hand_a_tile_to_another_and_be_better_off(
    loads: np.ndarray, total: int, weight: int, data: st.DataObject
) -> None:
    least = -(-total // len(loads))
    caps = np.array(data.draw(st.lists(st.integers(least, 300), min_size=len(loads), max_size=len(loads))))
    counts = divide(total, weight, loads, caps)
    assert counts.sum() == total
    assert (counts >= 0).all()
    assert (counts <= caps).all()
    after = loads + counts * weight
    givers, takers = after[counts > 0], after[counts < caps]
    if givers.size and takers.size:
        assert givers.max() <= takers.min() + weight


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tiles do not fit"):
        divide(5, 1, np.zeros(2, dtype=np.int64), np.array([2, 2]))


@given(total=st.integers(0, 1000), sms=st.integers(1, 200))
def test_even_shares_differ_by_one_at_most(total: int, sms: int) -> None:
    counts = evenly(total, sms)
    assert counts.sum() == total
    assert counts.max() - counts.min() <= 1


@given(counts=loads)
def test_ranges_follow_one_another(counts: np.ndarray) -> None:
    first = starts(counts)
    assert first[0] == 0
    assert (first[1:] == (first + counts)[:-1]).all()


def test_a_lead_counts_up_to_a_ring() -> None:
    assert settle(np.array([0, 90, 100]), 30).tolist() == [70, 90, 100]


def test_large_shares_go_to_small_loads() -> None:
    sizes, loads = np.array([5, 6, 4]), np.array([30, 10, 20])
    chosen = places(sizes, loads)
    assert sorted(chosen.tolist()) == [0, 1, 2]
    assert sizes[chosen].tolist() == [4, 6, 5]
