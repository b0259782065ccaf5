"""The exponential that oracle and kernel share, against the C library's in extended precision."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.step.oracle import exponential as module
from headrace.step.oracle.exponential import LEAST_EXPONENT, exponential

Doubles = module.Doubles


def units(x: Doubles) -> float:
    """The largest error, in units of the last place."""
    right = np.exp(x.astype(np.longdouble))
    return float((np.abs(exponential(x) - right) / np.spacing(right.astype(np.float64))).max())


def places() -> Doubles:
    generator = np.random.default_rng(3)
    near_zero = -np.exp(-generator.random(200_000) * 40)
    return np.concatenate([-generator.random(200_000) * 40, -generator.random(200_000) * 700, near_zero])


def test_it_is_right_to_a_unit_of_the_last_place() -> None:
    assert units(places()) < 1.0


def test_a_series_that_is_too_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TERMS", 10)
    assert units(places()) > 1.0


def test_its_ends() -> None:
    x = np.array([0.0, -0.0, LEAST_EXPONENT, np.nextafter(LEAST_EXPONENT, -1e3), -np.inf, np.nan])
    y = exponential(x)
    assert y[:2].tolist() == [1.0, 1.0]
    assert y[2] > 0
    assert y[3:].tolist() == [0.0, 0.0, 0.0]


def test_a_larger_number_has_no_smaller_exponential_where_weights_are_told_apart() -> None:
    """Weights go down with the score, or a border by weight would not be one by score."""
    x = np.sort(-np.random.default_rng(4).random(400_000) * 31).astype(np.float32).astype(np.float64)
    assert (np.diff(exponential(x)) >= 0).all()
