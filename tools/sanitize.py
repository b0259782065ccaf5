"""Runs the decode kernel under compute-sanitizer: one step of a small plan, on this machine's GPU.

    python -m tools.sanitize                      # memcheck, then racecheck
    python -m tools.sanitize --tool synccheck     # or initcheck

compute-sanitizer comes with CUDA, and as a package: pip install nvidia-cuda-sanitizer-api, of the version
of CUDA that the driver is for. Every tensor gets memory of its own, so that memcheck sees where one ends;
within the kernel's one piece of exchange buffers it cannot. racecheck knows shared memory only; for hops
between SMs there is tests/kernel/test_stress_on_gpu.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 9  # exit code of compute-sanitizer if it finds an error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be said more than once")
    parser.add_argument("--launch", action="store_true", help="only the step, without a sanitizer")
    options = parser.parse_args(arguments)
    if options.launch:
        step()
        return
    found = [tool for tool in options.tool or TOOLS[:2] if sanitize(tool)]
    if found:
        raise SystemExit(f"errors were found by {' and '.join(found)}")


def sanitize(tool: str) -> bool:
    """Whether a tool finds errors. Raises SystemExit if it cannot be run, or what it runs fails."""
    command = [
        *(sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", "kns=decode"),
        *("--report-api-errors", "no"),  # libraries ask the driver for functions that it may not have
        *(sys.executable, "-m", "tools.sanitize", "--launch"),
    ]
    print(" ".join(command), flush=True)
    code = subprocess.run(command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).returncode
    if code not in (0, FOUND):
        raise SystemExit(f"{tool}: exit code {code}")
    return code == FOUND


def sanitizer() -> str:
    """Where compute-sanitizer is. Raises SystemExit if it is nowhere."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    if (path := shutil.which("compute-sanitizer") or shutil.which(str(packaged))) is None:
        raise SystemExit("there is no compute-sanitizer here: pip install nvidia-cuda-sanitizer-api")
    return path


def step() -> None:
    """One step of four rows, whose buffers must be right as well."""
    from headrace.kernel.check.against_oracle import BOUND, Bench, step_errors, worst
    from headrace.kernel.launcher import LONGEST_WAIT, Launcher
    from headrace.model.kv import KVCache
    from headrace.step.pack import PackedWeights
    from headrace.step.plan import Plan

    def make(plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> Launcher:
        return Launcher(plan, weights, cache, table_blocks=blocks, strict=strict, timeout=LONGEST_WAIT)

    errors = step_errors(Bench([1, 64, 200, 130], 4, make=make))
    print(f"worst buffer: {worst(errors):.2g}")
    if not worst(errors) <= BOUND:
        raise SystemExit(f"buffers are wrong: {errors}")


if __name__ == "__main__":
    main()
