"""Which kernel decodes how many rows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.kernel.pool import KernelPool, capacity_for


@pytest.mark.parametrize(("rows", "capacity"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_the_smallest_capacity_that_holds_the_rows(rows: int, capacity: int) -> None:
    assert capacity_for(rows) == capacity


def test_more_rows_than_the_largest_kernel_has_are_refused() -> None:
    nothing = cast(Any, None)
    KernelPool(nothing, nothing, max_rows=16, max_context=100)
    with pytest.raises(ValueError, match="the kernel decodes at most 16 rows, not 17"):
        KernelPool(nothing, nothing, max_rows=17, max_context=100)
