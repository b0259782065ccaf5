"""Which kernel decodes how many rows."""

from __future__ import annotations

import pytest

from headrace.kernel.pool import capacity_for


@pytest.mark.parametrize(("rows", "capacity"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_the_smallest_capacity_that_holds_the_rows(rows: int, capacity: int) -> None:
    assert capacity_for(rows) == capacity
