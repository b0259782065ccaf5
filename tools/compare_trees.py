"""How fast the decode kernels of several source trees are, on the same GPU in the same run.

    python -m tools.compare_trees base=../main other=. --points 1x8K 8x8K 16x8K --rounds 4 --json ab.json

A tree is a git worktree, or any folder that holds the package `headrace`. Every round runs each tree's own
`headrace bench decode` once, for all points, in a process of its own; every second round in reverse order,
so that a GPU that warms up favours nobody: an even number of rounds is best. One process ends before the next
begins, since two with North's 61 GB of weights leave an H200 little for KV, and other GPUs none. That costs a
start for each tree and round, which is imports and random weights; kernels that the cache lacks are compiled
in the first round.

A ratio is the tree's milliseconds over those of the first tree in the same round, so below 1 is faster: the
median over rounds, and from the smallest to the largest. Where 1 lies between these, or there is one round
alone, "~" says that the run does not tell the two apart. The same folder under two names shows what a GPU
makes of no difference at all. A tree that fails or hangs is left out from then on; what it had measured
counts. The exit code is 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.compare import ResultsError, read_results
from headrace.bench.points import parse_point
from headrace.bench.results import command_line, write

LAST_LINES = 20  # of what a failed bench said
MS = "ms_per_step"

Found = Mapping[str, Any]  # a point of a results file


@dataclass(frozen=True)
class Run:
    """One tree's bench in one round: the results file that it wrote, if any; what went wrong, or nothing."""

    round: int
    tree: str
    results: Mapping[str, Any] | None
    failure: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="ratios are to the first")
    parser.add_argument("--points", nargs="+", default=["1x8K", "8x8K", "16x8K"], metavar="ROWSxCONTEXT")
    parser.add_argument("--rounds", type=int, default=4, help="each runs every tree once (default: 4)")
    parser.add_argument(
        "--options", type=shlex.split, default=[], help="for headrace bench decode: --options='--launches 40'"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds a tree and round (default: 300)")
    parser.add_argument("--json", type=Path, help="where the results go, as soon as there are any")
    given = parser.parse_args(arguments)
    try:
        trees = parse_trees(given.trees)
        for point in given.points:
            parse_point(point)
    except ValueError as error:
        parser.error(str(error))
    if given.rounds < 1 or not given.timeout > 0:
        parser.error("--rounds and --timeout must be above 0")

    runs: list[Run] = []
    left = list(trees)
    for number in range(1, given.rounds + 1):
        for name in left[:: 1 if number % 2 else -1]:
            found, failure = bench(trees[name], given.points, given.options, timeout=given.timeout)
            runs.append(Run(number, name, found, failure))
            if failure:
                left.remove(name)
            told = f"left out from here on: {failure}" if failure else "measured"
            print(f"round {number} of {given.rounds}, {name}: {told}", file=sys.stderr, flush=True)
            if given.json:
                folders = {each: str(folder) for each, folder in trees.items()}
                content = {"command": command_line(), "trees": folders, "runs": [asdict(run) for run in runs]}
                write(given.json, content)
    print(table(runs, list(trees), given.points, given.rounds))
    return 1 if len(left) < len(trees) else 0


def parse_trees(texts: Sequence[str]) -> dict[str, Path]:
    """Folders by name, in the order given. Raises ValueError where one is no tree; the message says why."""
    trees: dict[str, Path] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise ValueError(f"{text!r} is not NAME=FOLDER")
        if name in trees:
            raise ValueError(f"two trees are called {name}")
        trees[name] = Path(folder).absolute()
        # Without it, Python would find a headrace that is installed, and measure that.
        if not (trees[name] / "headrace" / "__init__.py").is_file():
            raise ValueError(f"{name}: there is no package headrace in {trees[name]}")
    if len(trees) < 2:
        raise ValueError("name two trees or more, each as NAME=FOLDER")
    return trees


def bench(
    tree: Path, points: Sequence[str], options: Sequence[str], *, timeout: float
) -> tuple[dict[str, Any] | None, str]:
    """Measure the points by a tree's code: its results file, if there is one; what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        saved, said = Path(folder) / "results.json", Path(folder) / "said"
        asked = [*options, f"--json={saved}", *(f"--point={point}" for point in points)]
        # A file, no pipe: what a bench that hangs has started could hold a pipe open after its end.
        with said.open("w") as output:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "headrace.cli", "bench", "decode", *asked],
                    cwd=tree,  # python -m looks there first, and in $PYTHONPATH next
                    env=environment(tree),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                    check=False,
                )
                failure = f"its bench ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                failure = f"its bench was not over after {timeout:g} seconds"
        results = None
        try:
            read_results(saved)
            results = json.loads(saved.read_text(encoding="utf-8"))
        except ResultsError as error:
            failure = failure or f"its bench left no results: {error}"
        lines = filter(str.strip, said.read_text(encoding="utf-8", errors="replace").splitlines())
        return results, "\n    ".join([failure, *list(lines)[-LAST_LINES:]]) if failure else ""


def environment(tree: Path) -> dict[str, str]:
    """This process's, but for a tree. $HEADRACE_COMMIT is gone: it can be that of one tree only."""
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {name: value for name, value in os.environ.items() if name != "HEADRACE_COMMIT"}
    return ours | {"PYTHONPATH": os.pathsep.join(paths)}


def table(runs: Sequence[Run], trees: Sequence[str], points: Sequence[str], rounds: int) -> str:
    """A line for every point and tree."""
    wide, names = (max(map(len, column)) for column in ([*points, "point"], [*trees, "tree"]))
    numbers = range(1, rounds + 1)
    heads = "".join(f"{f'round {number}':>9}" for number in numbers)
    last = f"{'ratio, from..to':>20}  of limit   MHz      W"
    lines = [f"{'point':{wide}}  {'tree':{names}}{heads}   median  {last}"]
    for point in points:
        first = rounds_of(runs, trees[0], point)
        for tree in trees:
            found = rounds_of(runs, tree, point)
            times = "".join(f"{found[each][MS]:9.3f}" if each in found else f"{'-':>9}" for each in numbers)
            both = [] if tree == trees[0] else [each for each in found if each in first]
            ratios = [found[each][MS] / first[each][MS] for each in both]
            over_all = medians(list(found.values()), ratios) if found else "  failed"
            lines.append(f"{point:{wide}}  {tree:{names}}{times} {over_all}")
    return "\n".join(lines)


def rounds_of(runs: Sequence[Run], tree: str, point: str) -> dict[int, Found]:
    """What a tree's runs have of a point, by round."""
    wanted = parse_point(point)
    return {
        run.round: found
        for run in runs
        if run.tree == tree and run.results is not None
        for found in run.results["points"]
        if (found["rows"], found["context"]) == (wanted.rows, wanted.context)
    }


def medians(found: Sequence[Found], ratios: Sequence[float]) -> str:
    """The cells that are over all rounds; a star at the watts if power was at its limit in any of them."""
    ratio = ""
    if ratios:
        sign = "~" if len(ratios) == 1 or min(ratios) <= 1 <= max(ratios) else ""
        ratio = f"{sign}{median(ratios):.3f} {min(ratios):.3f}..{max(ratios):.3f}"
    cells = f"{median(each[MS] for each in found):8.3f}  {ratio:>20}"
    cells += f"  {median(each['share_of_limit'] for each in found):8.1%}"
    if watched := [each for each in found if each.get("power_w") is not None]:
        star = "*" if any(each["power_limited"] for each in watched) else ""
        watts = f"{star}{median(each['power_w'] for each in watched):.0f}"
        cells += f"  {median(each['sm_clock_mhz'] for each in watched):4.0f}  {watts:>5}"
    return cells


if __name__ == "__main__":
    sys.exit(main())
