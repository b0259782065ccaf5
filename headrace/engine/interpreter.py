"""Settings of Python's interpreter under which an engine's thread waits for less."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

SWITCH_INTERVAL = 0.5e-3  # seconds


@contextlib.contextmanager
def settled_interpreter() -> Iterator[None]:
    """Have the interpreter keep an engine's thread waiting for less, once all is loaded; put back at the end.

    Its collector would look through all that there is now and then, some 230,000 objects after the imports
    alone: a tenth of a second in which nobody gets a token. And a thread that runs Python, as the server's
    does for a large request, would let go of the interpreter only after 5 ms, each time that it gets it.

    Both hold for the whole process: so this is for the command that the process is there for, and not for an
    engine, of which a process may have several.
    """
    interval = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
