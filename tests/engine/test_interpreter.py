"""Settings of the whole process: a server has them while it runs, and nobody after it."""

from __future__ import annotations

import gc
import sys

import pytest

from headrace.engine.interpreter import SWITCH_INTERVAL, settled_interpreter


def test_the_collector_passes_over_what_there_was() -> None:
    before = len(gc.get_objects())
    with settled_interpreter():
        assert len(gc.get_objects()) < before / 10
    assert len(gc.get_objects()) > before / 2


def test_who_runs_python_lets_go_of_the_interpreter_sooner() -> None:
    before = sys.getswitchinterval()
    with settled_interpreter():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    assert sys.getswitchinterval() == before > 5 * SWITCH_INTERVAL


def test_both_are_put_back_after_a_failure() -> None:
    before = sys.getswitchinterval(), gc.get_freeze_count()
    with pytest.raises(RuntimeError, match="failed"), settled_interpreter():
        raise RuntimeError("the server failed")
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == before
