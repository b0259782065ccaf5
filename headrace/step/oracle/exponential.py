"""exp in float64 by a fixed sequence of roundings: the kernel's `exponential.h` has the same bits.

Libraries differ in the last bit, and a token's weight for top_p would differ with it. Here every operation is
an IEEE addition, subtraction or multiplication that rounds by itself, so there is one result everywhere.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

LEAST_EXPONENT = -700.0
TO_INTEGER = 1.5 * 2.0**52  # added and subtracted, rounds to the nearest integer
INVERSE_LN2 = float.fromhex("0x1.71547652b82fep0")
# ln 2 in two parts, of which the first has zeros at its end: its product is exact.
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
TERMS = 13  # of the series: |r| is at most ln(2) / 2


def exponential(x: Doubles) -> Doubles:
    """exp(x) for x from LEAST_EXPONENT to 0, within 1 unit of the last place.

    0 for what is below, or no number.
    """
    inside = x >= LEAST_EXPONENT
    x = np.where(inside, x, 0.0)
    n = (x * INVERSE_LN2 + TO_INTEGER) - TO_INTEGER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    total = np.full_like(x, 1.0 / math.factorial(TERMS))
    for term in range(TERMS - 1, 1, -1):
        total = total * r + 1.0 / math.factorial(term)
    total = 1.0 + (r + total * (r * r))
    return np.where(inside, np.ldexp(total, n.astype(np.int32)), 0.0)
