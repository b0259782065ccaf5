"""What the oracle finds wrong with a plan."""

from __future__ import annotations


class HazardError(RuntimeError):
    """A task touched data that its counters do not protect; the message names task, SM and buffer.

    Raised for data that nobody wrote for this layer and step, for data whose writer the reader has not waited
    for, and for a write over data that another task may still read.
    """


class StuckError(RuntimeError):
    """No agent of any SM can go on; the message names what each waits for."""
