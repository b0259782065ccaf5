"""Properties hold on a slow machine as well: see conftest.py."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

SLOW = 0.3  # seconds: more than Hypothesis lets an example take


def slowly(value: bool) -> bool:
    time.sleep(SLOW)
    return value


@settings(max_examples=2)
@given(st.booleans())
def test_an_example_may_take_its_time(value: bool) -> None:
    slowly(value)


@settings(max_examples=5)
@given(st.lists(st.booleans().map(slowly), min_size=1, max_size=3))
def test_and_so_may_what_thinks_it_up(values: list[bool]) -> None:
    pass
