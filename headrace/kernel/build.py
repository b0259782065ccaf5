"""Compiles kernels at run time, by `cuda.core` with NVRTC, and keeps the results on disk.

No compiler is needed on the machine, nor a GPU. The key of a cached result covers the compiler's version, all
options and the text of every header, so it cannot be stale; a result appears under its name by one rename.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.kernel.variant import Variant

INCLUDE = Path(__file__).parent / "include"
SOURCE = '#include "decode.h"\n'
# For `cuda.core.ProgramOptions`. No header is looked for in the folder that the server was started in.
OPTIONS = {
    "arch": "sm_90a",
    "std": "c++17",
    "ptxas_options": ["-v", "--warn-on-spills"],
    "no_source_include": True,
}
# NVRTC has no standard library; these are all that the headers take from it.
STANDARD = {
    "cstdint": (
        "#pragma once\n"
        "using int8_t = signed char; using uint8_t = unsigned char;\n"
        "using int16_t = short; using uint16_t = unsigned short;\n"
        "using int32_t = int; using uint32_t = unsigned int;\n"
        "using int64_t = long long; using uint64_t = unsigned long long;\n"
        "using uintptr_t = unsigned long long;\n"
    ),
    "cstddef": (
        "#pragma once\n"
        "using size_t = decltype(sizeof(0));\n"
        "#define offsetof(t, m) ((size_t)__INTADDR__(&(((t*)0)->m)))\n"
    ),
}


class BuildError(RuntimeError):
    """A kernel does not compile, or the result is not fit to run; the message has the compiler's words."""


@dataclass(frozen=True)
class Resources:
    """What the assembler says of the kernel: registers of a thread at entry, bytes of stack, of spills."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    def check(self) -> None:
        """Raise BuildError where the kernel uses local memory."""
        if self.stack or self.spill_stores or self.spill_loads:
            raise BuildError(
                f"the kernel uses local memory: {self.stack} bytes of stack, "
                f"{self.spill_stores} bytes of spill stores, {self.spill_loads} of spill loads"
            )


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: the cubin, and the compiler's log."""

    cubin: bytes
    log: str
    seconds: float  # that the compilation took; 0 from the cache

    @property
    def resources(self) -> Resources:
        return resources_of(self.log)


def cache_directory() -> Path:
    """Where compiled kernels are kept: $HEADRACE_CACHE, or headrace/kernels in the user's cache."""
    if (chosen := os.environ.get("HEADRACE_CACHE")) is not None:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / "kernels"


def build(
    variant: Variant, *, cache: Path | None = None, progress: Callable[[str], None] | None = None
) -> Binary:
    """The binary of a variant, from the cache or compiled. `progress` gets one line if it is compiled.

    Raises BuildError if it does not compile, or if NVRTC is not installed.
    """
    headers = {**STANDARD, **fixed_headers(), **variant.headers}
    line = "Compiling the decode kernel for this model; the result is kept for the next start"
    return build_source(SOURCE, headers, cache=cache, before=lambda: progress and progress(line))


def build_source(
    source: str,
    headers: dict[str, str],
    *,
    cache: Path | None = None,
    before: Callable[[], object] = lambda: None,
) -> Binary:
    """The binary of a source and the headers that it includes, from the cache or compiled, after `before`.

    Raises BuildError as `build` does.
    """
    folder = cache if cache is not None else cache_directory()
    place = folder / f"{cache_key(headers, compiler_version(), source)}.cubin"
    try:
        return Binary(place.read_bytes(), place.with_suffix(".log").read_text(), 0.0)
    except FileNotFoundError:
        pass
    before()
    begun = time.monotonic()
    cubin, log = compile_source(source, headers)
    folder.mkdir(parents=True, exist_ok=True)
    _publish(place.with_suffix(".log"), log.encode())  # first, so that a cubin never lacks its log
    _publish(place, cubin)
    return Binary(cubin, log, time.monotonic() - begun)


def build_all(
    variants: Sequence[Variant], *, cache: Path | None = None, progress: Callable[[str], None] | None = None
) -> list[Binary]:
    """The binaries of several variants, those that are not in the cache compiled side by side.

    `progress` gets one line if any is compiled. Raises BuildError as `build` does.
    """
    told = threading.Lock()

    def tell(line: str) -> None:
        if progress is not None and told.acquire(blocking=False):
            progress(line)

    with ThreadPoolExecutor(max_workers=max(len(variants), 1)) as pool:
        return list(pool.map(lambda variant: build(variant, cache=cache, progress=tell), variants))


def fixed_headers() -> dict[str, str]:
    """The text of every header in include/, by its path there."""
    return {str(path.relative_to(INCLUDE)): path.read_text() for path in sorted(INCLUDE.rglob("*.h"))}


def cache_key(headers: dict[str, str], version: str, source: str = SOURCE) -> str:
    """A name that differs whenever the outcome could."""
    digest = hashlib.sha256()
    for part in (
        version,
        repr(OPTIONS),
        source,
        *(text for name in sorted(headers) for text in (name, headers[name])),
    ):
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()[:32]


def has_compiler() -> bool:
    """Whether cuda.core and NVRTC's bindings are installed."""
    try:
        return all(importlib.util.find_spec(name) for name in ("cuda.core", "cuda.bindings.nvrtc"))
    except ImportError:  # no package `cuda` at all
        return False


def compiler_version() -> str:
    """NVRTC's version. Raises BuildError if it is not installed."""
    _cuda_core()
    from cuda.bindings import nvrtc  # cuda.core does not tell it

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def compile_source(source: str, headers: dict[str, str]) -> tuple[bytes, str]:
    """The cubin and the log. Raises BuildError with the log if the source is wrong."""
    core = _cuda_core()
    log = io.StringIO()
    # cuda.core takes no headers from memory, as NVRTC itself does: they are files while it compiles.
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        for name, text in headers.items():
            place = Path(folder, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text.encode())
        options = core.ProgramOptions(name="decode.cu", include_path=folder, **OPTIONS)
        try:
            cubin: bytes = core.Program(source, "c++", options).compile("cubin", logs=log).code
        except Exception as error:  # its class has no public name; the message has the log
            raise BuildError(f"the kernel does not compile:\n{error}") from None
    return cubin, log.getvalue().rstrip("\0 ")


def resources_of(log: str) -> Resources:
    """Read `ptxas -v`'s report. Raises BuildError if there is none."""
    used = re.search(r"Used (\d+) registers", log)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if used is None or memory is None:
        raise BuildError(f"the compiler's log has no resource report:\n{log}")
    return Resources(int(used[1]), *(int(number) for number in memory.groups()))


def _publish(place: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, place)


_importing = threading.Lock()


def _cuda_core() -> Any:
    try:
        with _importing:  # it swaps modules while it is imported: another thread can find it half done
            from cuda import core
    except ImportError:
        raise BuildError(
            "kernels are compiled with cuda.core and NVRTC, which are not installed: "
            "pip install 'headrace[gpu]'"
        ) from None
    return core
