"""How tests wait: for what they want to see, and never for a time.

The end of a wait that lasts too long is no verdict: it only keeps a hang from lasting for ever. So WAIT is
far longer than what a slow machine needs that has much else to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT = 100.0  # seconds
_BETWEEN_LOOKS = 0.005  # seconds


def comes(condition: Callable[[], object], seconds: float = WAIT) -> bool:
    """Whether `condition` holds sooner or later."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return bool(condition())
        time.sleep(_BETWEEN_LOOKS)
    return True


def until(condition: Callable[[], object], seconds: float = WAIT) -> None:
    """Wait for `condition` to hold; AssertionError if it never does."""
    assert comes(condition, seconds), "it never came"
