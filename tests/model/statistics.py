"""p-values of the tests that judge random numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


def chi_square(counts: npt.NDArray[np.int64], expected: Floats) -> float:
    """Pearson's test: how likely counts this far from `expected` are. An impossible one is not likely at all.

    Cells that expect fewer than 5 are taken together.
    """
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def independence(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], values: int) -> float:
    """Chi-square test that pairs of numbers below `values` are independent."""
    table = np.zeros((values, values), dtype=np.int64)
    np.add.at(table, (first, second), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    freedom = torch.tensor((values - 1) ** 2 / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def kolmogorov_smirnov(values: Floats) -> float:
    """How likely a sample this far from uniform on (0, 1) is (Kolmogorov's limit distribution)."""
    ordered, count = np.sort(values), len(values)
    above = np.arange(1, count + 1) / count - ordered
    below = ordered - np.arange(count) / count
    distance = max(above.max(), below.max()) * np.sqrt(count)
    terms = np.arange(1, 101)
    return float(2 * ((-1.0) ** (terms - 1) * np.exp(-2 * terms**2 * distance**2)).sum())
