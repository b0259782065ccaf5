"""The GPU's clock and power while it is measured, and whether its power limit slowed it down.

`nvidia-smi` looks, which is there with every driver. It does so in a process of its own: what is timed is a
loop of this process, and NVML's bindings would take Python's lock from it at every look. A thread here only
notes when each line came; lines are read once a point is over.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

_FIELDS = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
_LINE = re.compile(r"(\d+), (\d+(?:\.\d+)?), 0x([0-9a-fA-F]+)")
_EVERY_MILLISECONDS = 50
_LEAST_LOOKS = 5  # a quarter of a second: fewer say little
_LIMITED_LOOKS = 0.25  # this part of them, or more: there is time to be gained with more power or less heat
# Of NVML's nvmlClocksEventReasons: SwPowerCap, HwPowerBrakeSlowdown.
_POWER_REASONS = 0x04 | 0x80


@dataclass(frozen=True)
class Power:
    """Of one point: medians of the SMs' clock and of the board's power over the looks while it was timed.

    `limited`: for power, the driver or the board held the clock down in a quarter of the looks or more.
    """

    sm_clock_mhz: float
    watts: float
    limited: bool


class Watch:
    """Looks at a GPU from its `with` statement's begin to its end; not at all where `command` cannot be run.

    `command` writes a line a look to standard output, as `nvidia_smi` does; `clock` says when one came.
    """

    def __init__(self, command: Sequence[str], *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._command, self._clock = command, clock
        self._lines: list[tuple[float, str]] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, name="power watch", daemon=True)

    def __enter__(self) -> Watch:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError:
            return self
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        with self._process:
            self._process.kill()
            self._thread.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append((self._clock(), line))

    def between(self, begin: float, end: float) -> Power | None:
        """Of the looks from `begin` to `end` by the watch's clock; None where they are too few to say."""
        # A copy, since the thread goes on.
        texts = [line.strip() for at, line in list(self._lines) if begin <= at <= end]
        looks = [match for match in map(_LINE.fullmatch, texts) if match]
        if len(looks) < _LEAST_LOOKS:
            return None
        limited = sum(bool(int(look[3], 16) & _POWER_REASONS) for look in looks)
        return Power(
            sm_clock_mhz=statistics.median(int(look[1]) for look in looks),
            watts=statistics.median(float(look[2]) for look in looks),
            limited=limited >= _LIMITED_LOOKS * len(looks),
        )


def nvidia_smi(uuid: str) -> list[str]:
    """The command for a `Watch` of the GPU with this UUID, as PyTorch has it: without "GPU-".

    Indices would not do: those of nvidia-smi heed neither $CUDA_VISIBLE_DEVICES nor CUDA's order.
    """
    return [
        "nvidia-smi",
        f"--id=GPU-{uuid}",
        f"--query-gpu={_FIELDS}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_EVERY_MILLISECONDS}",
    ]
