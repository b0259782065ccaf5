"""Runs the decode kernel under compute-sanitizer: a few steps of a small plan, on this machine's GPU.

    python -m tools.sanitize                      # memcheck, then racecheck
    python -m tools.sanitize --tool synccheck     # or initcheck
    python -m tools.sanitize --rows 16 --steps 4  # the kernel for more rows, longer launches

compute-sanitizer comes with CUDA, and as a package: pip install nvidia-cuda-sanitizer-api, of the version
of CUDA that the driver is for. Every tensor gets memory of its own, so that memcheck sees where one ends;
within the kernel's one piece of exchange buffers it cannot. racecheck knows shared memory only; for hops
between SMs there is tests/kernel/test_stress_on_gpu.py.

The exit code is 1 if a tool finds an error, or what it runs fails. What racecheck finds does not count: it
takes much for a race that is none (docs/measuring.md says what), so that is told by pairs of lines, for
reading.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headrace.kernel import build
from headrace.kernel.check.against_oracle import BOUND, SETTINGS, Bench, step_errors, worst
from headrace.kernel.check.kernels import MakeKernel
from headrace.kernel.check.sampling import KINDS, wrong_draws
from headrace.kernel.launcher import LONGEST_WAIT, Launcher
from headrace.model.kv import KVCache
from headrace.step.isa import ROW_CAPACITIES
from headrace.step.pack import PackedWeights
from headrace.step.plan import Plan

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
READ_ONLY = "racecheck"  # its findings are for reading
FOUND = 9  # exit code of compute-sanitizer if it finds an error

_ACCESS = re.compile(r"(Read|Write) access at (.*?)(?: \[(\d+) hazards?\])?\s*$")
_LINE = re.compile(r"([^/\s]+):(\d+)")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be said more than once")
    parser.add_argument("--rows", type=int, choices=ROW_CAPACITIES, default=4, help="that the kernel is for")
    parser.add_argument("--steps", type=int, default=3, help="of a launch whose rows are drawn")
    parser.add_argument("--launch", action="store_true", help="only the steps, without a sanitizer")
    options = parser.parse_args(arguments)
    if options.launch:
        launch(options.rows, options.steps, on_gpu)
        return
    subprocess.run([sanitizer(), "--version"], check=True)
    tools = options.tool or TOOLS[:2]
    found = [tool for tool in tools if sanitize(tool, options.rows, options.steps)]
    if found:
        raise SystemExit(f"errors were found by {' and '.join(found)}")


def sanitize(tool: str, rows: int, steps: int) -> bool:
    """Whether a tool finds errors that count. Raises SystemExit if it or what it runs fails."""
    command = [
        *(sanitizer(), "--tool", tool, "--kernel-name", "kns=decode"),
        *("--report-api-errors", "no"),  # libraries ask the driver for functions that it may not have
        *(() if tool == READ_ONLY else ("--error-exitcode", str(FOUND))),
        *(sys.executable, "-m", "tools.sanitize", "--launch", "--rows", str(rows), "--steps", str(steps)),
    ]
    print(" ".join(command), flush=True)
    code, report = run(command)
    if code not in (0, FOUND):
        raise SystemExit(f"{tool}: exit code {code}")
    if "SUMMARY" not in report:
        raise SystemExit(f"{tool} has not come to its summary")
    if tool == READ_ONLY:
        print(in_words(pairs_of(report)), flush=True)
    return code == FOUND


def run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a command; the output is shown as it comes."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    lines = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def sanitizer() -> str:
    """Where compute-sanitizer is. Raises SystemExit if it is nowhere."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    if (path := shutil.which("compute-sanitizer") or shutil.which(str(packaged))) is None:
        raise SystemExit("there is no compute-sanitizer here: pip install nvidia-cuda-sanitizer-api")
    return path


def pairs_of(report: str) -> Counter[tuple[str, str]]:
    """racecheck's hazards by the two accesses, each as `write gemm.h:188`, in the order of their names."""
    hazards: Counter[tuple[str, str]] = Counter()
    first = ""
    for line in report.splitlines():
        if (access := _ACCESS.search(line)) is None:
            continue
        kind, where, count = access.groups()
        place = _LINE.search(where)
        named = f"{kind.lower()} {place[0] if place else where}"
        if "Race reported between" in line:
            first = named
        else:
            low, high = sorted((first, named))
            hazards[low, high] += int(count or 1)
    return hazards


def in_words(hazards: Counter[tuple[str, str]]) -> str:
    """A line for every pair."""
    lines = [f"{count:9,}  {one}, {other}" for (one, other), count in hazards.most_common()]
    return "\n".join([f"{len(hazards)} pairs of accesses that racecheck sees no order between", *lines])


def on_gpu(plan: Plan, weights: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> Launcher:
    """A kernel that knows the lines it was made of; its code is the same."""
    build.OPTIONS["lineinfo"] = True  # in this process, which does nothing else
    return Launcher(plan, weights, cache, table_blocks=blocks, strict=strict, timeout=LONGEST_WAIT)


def launch(rows: int, steps: int, make: MakeKernel, device: str = "cuda", sms: int = 132) -> None:
    """A step of greedy rows, then launches of rows that are drawn. Raises SystemExit if anything is wrong."""
    [setting] = [setting for setting in SETTINGS if setting[1] == rows]
    bench = Bench(*setting, make=make, device=device, sms=sms)
    errors = step_errors(bench)
    print(f"worst buffer: {worst(errors):.2g}")
    if not worst(errors) <= BOUND:
        raise SystemExit(f"buffers are wrong: {errors}")
    rounds = max(len(KINDS) // len(bench.live), 1)
    wrong = wrong_draws(bench, rounds, steps)
    print(f"{rounds} launches of {steps} steps, wrong tokens: {wrong}")
    if wrong:
        raise SystemExit("tokens are wrong")


if __name__ == "__main__":
    main()
