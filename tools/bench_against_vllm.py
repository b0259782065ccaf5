"""Decode speed of headrace and of vLLM, measured on the same GPU in the same run, both in one results file.

First `headrace bench decode` in a process of its own, then vLLM's benchmark: any command that writes a file
such as headrace/bench/compare.py describes. Of that command {decode} becomes the points to measure, as
ROWS:CONTEXT,..., and {out} the file to write. Its environment is this process's, and --set adds to it:

    python tools/bench_against_vllm.py --json decode-h200.json \\
        --set VLLM_USE_FLASHINFER_SAMPLER=0 --set PYTHONPATH=VLLM_FOLDER:BENCH_FOLDER \\
        --vllm "python3 bench_vllm.py --model MODEL --connector filled --decode {decode} --out {out}"

Points of mixed lengths, and those longer than --vllm-longest, are measured on our side alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.compare import ResultsError, merged, read_results
from headrace.bench.points import DEFAULT_POINTS, Point, parse_point
from headrace.bench.results import write


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--vllm", required=True, metavar="COMMAND", help="vLLM's benchmark")
    parser.add_argument("--point", action="append", help="what to measure, as headrace bench decode has it")
    parser.add_argument("--ours", default="", metavar="OPTIONS", help="more options of headrace bench decode")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="for vLLM's environment"
    )
    parser.add_argument("--vllm-longest", type=int, default=131072, help="most tokens of context for vLLM")
    parser.add_argument("--vllm-timeout", type=float, default=540, help="seconds")
    given = parser.parse_args(arguments)
    names = given.point or list(DEFAULT_POINTS)
    points = [parse_point(name) for name in names]

    ours = [sys.executable, "-m", "headrace.cli", "bench", "decode", "--json", str(given.json)]
    for name in names:
        ours += ["--point", name]
    if failed := subprocess.run([*ours, *shlex.split(given.ours)], check=False).returncode:
        return failed  # it has said why
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "vllm.json"
        command = vllm_command(given.vllm, points, out, longest=given.vllm_longest)
        failure = run_vllm(command, given.set, timeout=given.vllm_timeout)
        join(given.json, out, shlex.join([Path(sys.argv[0]).name, *(arguments or sys.argv[1:])]))
    return report(given.json, failure)


def vllm_command(template: str, points: Sequence[Point], out: Path, *, longest: int) -> list[str]:
    """The command with its points and file filled in."""
    same = [
        (point.rows, point.context)
        for point in points
        if isinstance(point.context, int) and point.context <= longest
    ]
    decode = ",".join(f"{rows}:{context}" for rows, context in same)
    return [part.replace("{decode}", decode).replace("{out}", str(out)) for part in shlex.split(template)]


def run_vllm(command: Sequence[str], settings: Sequence[str], *, timeout: float) -> str:
    """Run vLLM's benchmark; what went wrong, or nothing. What it wrote until then counts all the same."""
    environment = os.environ | dict(setting.split("=", 1) for setting in settings)
    try:
        done = subprocess.run(command, env=environment, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"vLLM's benchmark ended with {done.returncode}" if done.returncode else ""


def join(path: Path, theirs: Path, command: str) -> None:
    """Put vLLM's figures and version into the results at `path`, as far as there are any."""
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        results = read_results(theirs)
    except ResultsError:
        return
    content["command"] = command
    content["versions"]["vllm"] = results.title.removeprefix("vLLM ")
    content["points"] = merged(content["points"], results)
    write(path, content)


def report(path: Path, failure: str) -> int:
    """Print both sides; 1 if vLLM's failed."""
    for point in json.loads(path.read_text(encoding="utf-8"))["points"]:
        theirs = point["vllm_tokens_per_s"]
        against = f"vLLM {theirs:8.1f}, ratio {point['tokens_per_s'] / theirs:.2f}" if theirs else "vLLM -"
        print(
            f"{point['rows']:3} rows, context {point['context']}: {point['tokens_per_s']:8.1f} tokens/s, "
            f"{point['share_of_limit']:.1%} of the limit; {against}"
        )
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
