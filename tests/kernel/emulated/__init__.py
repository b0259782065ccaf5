"""The kernel, compiled for the host and run thread by thread: the very headers that a GPU runs.

Only ptx.h is another, and for sampling alone consumer.h. What it cannot show is what one host thread has no
part in: the order in which memory changes for others, registers, and a GPU's own logarithms and products.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from headrace.kernel.build import fixed_headers
from headrace.kernel.variant import variant_of
from headrace.step.plan import Plan

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
COMMON = ("scheduler.h", "copies.h", "alignment.h", "cuda.h", "ptx.h")
# One of several libraries in a process must not take another's variables for its own.
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
CHECKED = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")
# Words of a header that a host's compiler cannot take, and what stands for them.
OTHERS = {
    "decode.h": ("extern __shared__ __align__(128) uint8_t memory[];", "uint8_t* memory = shared_begin();")
}

Spoilt = tuple[str, str, str]  # a header, words in it and what stands there instead


class EmulationError(RuntimeError):
    """The launch did not come to its end; the message says why."""


class Library:
    """A kernel of a plan, or a part of it: a source of this folder with its own headers.

    `folder` keeps what is compiled; `spoilt` is put into the kernel's headers.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        source: str,
        *own: str,
        strict: bool = False,
        trace: bool = False,
        spoilt: Spoilt | None = None,
    ) -> None:
        place = folder / "launch.so"
        if not place.exists():
            headers = {**fixed_headers(), **variant_of(plan, strict=strict, trace=trace).headers}
            changes = [(name, *words) for name, words in OTHERS.items()] + ([spoilt] if spoilt else [])
            for name, words, others in changes:
                assert words in headers[name]
                headers[name] = headers[name].replace(words, others)
            headers |= {name: (HERE / name).read_text() for name in (*COMMON, *own, source)}
            compile_at(folder, source, headers)
        self._loaded = ctypes.CDLL(str(place))
        self._loaded.run.restype = ctypes.c_char_p

    def run(self, *values: np.ndarray[Any, Any] | int) -> None:
        """Raises EmulationError if it does not come to its end."""
        given = [
            ctypes.c_uint32(value) if isinstance(value, int) else ctypes.c_void_p(value.ctypes.data)
            for value in values
        ]
        if (failure := self._loaded.run(*given)) is not None:
            raise EmulationError(failure.decode())


def compile_at(folder: Path, source: str, headers: dict[str, str]) -> None:
    """Make launch.so there."""
    assert COMPILER is not None
    for name, text in headers.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    made, linked = folder / "launch.o", folder / "linked.so"
    command = [COMPILER, *OPTIONS, *CHECKED, f"-I{folder}", "-c", "-o", str(made), str(folder / source)]
    subprocess.run(command, check=True)
    # Without the compiler's own library, as alignment.h has what is called of it.
    subprocess.run([COMPILER, "-shared", "-o", str(linked), str(made)], check=True)
    linked.rename(folder / "launch.so")
