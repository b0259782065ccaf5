"""How fast the decode kernel is with other headers, on the same GPU over the same weights, in one process.

    python -m tools.compare_headers near=/tmp/near far=/tmp/far --points 1x8K 8x8K --rounds 3

A folder is a copy of headrace/kernel/include, or of some of its headers, in which something is changed: the
first way to try an idea, as one start and one set of weights do for all. What changes the plan or Python code
is compared by `tools.compare_trees`, whose table this one's is. The kernel as it is comes first, as `base`,
and ratios are to it. Every round measures all points of all kernels, every second round in reverse order.
Kernels that the cache lacks are compiled before the first, side by side.

A kernel that fails is left out from then on; what it had measured counts. The exit code is 1 if one did. Here
a kernel may be wrong and still fast: parts left out tell what they cost. Its results need only be numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.bench.decode import BenchError, Method, Pool, bandwidth_of, check_room, hopper, measure
from headrace.bench.points import Point, parse_point
from headrace.bench.power import Watch, nvidia_smi
from headrace.kernel.build import BuildError, build_all
from headrace.kernel.launcher import Launcher, WatchdogError
from headrace.kernel.pool import capacity_for
from headrace.kernel.variant import variant_of
from headrace.model.kv import blocks_for
from headrace.model.presets import PRESETS
from headrace.step.pack import pack_synthetic
from headrace.step.planner import build_plan
from tools.compare_trees import Run, table

BASE = "base"
Headers = Mapping[str, str]
Measure = Callable[[str, Point], Mapping[str, Any]]  # of a kernel and a point: as results files have it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER", help="kernels beside the one as it is")
    parser.add_argument("--points", nargs="+", default=["1x8K", "8x8K", "16x8K"], metavar="ROWSxCONTEXT")
    parser.add_argument("--rounds", type=int, default=3, help="each measures every kernel (default: 3)")
    parser.add_argument("--launches", type=int, default=12, help="timed of each point (default: 12)")
    parser.add_argument("--synthetic", choices=PRESETS, default="north-mini-code", help="whose sizes")
    given = parser.parse_args(arguments)
    try:
        kernels = parse_kernels(given.folders)
        points = {text: parse_point(text) for text in given.points}
    except ValueError as error:
        parser.error(str(error))
    if given.rounds < 1 or given.launches < 1:
        parser.error("--rounds and --launches must be above 0")
    try:
        with on_gpu(given.synthetic, kernels, list(points.values()), given.launches) as measured:
            runs = list(compare(list(kernels), list(points.values()), given.rounds, measured))
    except (BenchError, BuildError) as error:
        print(f"compare_headers: {error}", file=sys.stderr)
        return 2
    print(table(runs, list(kernels), list(points), given.rounds))
    return 1 if any(run.failure for run in runs) else 0


def parse_kernels(texts: Sequence[str]) -> dict[str, Headers]:
    """Headers by the kernel's name, none for the one as it is. Raises ValueError; the message says why."""
    kernels: dict[str, Headers] = {BASE: {}}
    for text in texts:
        name, _, place = text.partition("=")
        if not name or not place:
            raise ValueError(f"{text!r} is not NAME=FOLDER")
        if name in kernels:
            raise ValueError(
                f"two kernels are called {name}" if name != BASE else f"{BASE} is the kernel as it is"
            )
        folder = Path(place)
        kernels[name] = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.h")}
        if not kernels[name]:
            raise ValueError(f"{name}: there is no header in {place}")
    return kernels


def compare(names: Sequence[str], points: Sequence[Point], rounds: int, measured: Measure) -> Iterator[Run]:
    """Measure all points of all kernels, round by round; who fails is in no later round."""
    left = list(names)
    for number in range(1, rounds + 1):
        for name in left[:: 1 if number % 2 else -1]:
            found: list[Mapping[str, Any]] = []
            failure = ""
            try:
                for point in points:
                    found.append(measured(name, point))
            except (BenchError, BuildError, WatchdogError) as error:
                failure = str(error)
                left.remove(name)
                print(
                    f"round {number}, {name}: left out from here on: {failure}", file=sys.stderr, flush=True
                )
            yield Run(number, name, {"points": found}, failure)


@contextmanager
def on_gpu(
    synthetic: str, kernels: Mapping[str, Headers], points: Sequence[Point], launches: int
) -> Iterator[Measure]:
    """What measures a point of a kernel, whose headers are given by its name, on this machine's GPU.

    Raises BenchError where there is none, BuildError for a kernel that does not compile.
    """
    hopper()
    config, method = PRESETS[synthetic], Method(launches=launches, warm_up=2)
    check_room(config, points, method, torch.cuda.mem_get_info()[0])
    properties = torch.cuda.get_device_properties(0)
    capacities = sorted({capacity_for(point.rows) for point in points})
    plans = {rows: build_plan(config, rows=rows, sms=properties.multi_processor_count) for rows in capacities}
    build_all([variant_of(plan).replaced(headers) for plan in plans.values() for headers in kernels.values()])
    weights = pack_synthetic(config, seed=method.seed, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    pool = Pool(config, points, method, "cuda")
    tables = {point: pool.tables(point) for point in points}  # the same for all kernels
    blocks = blocks_for(max(max(point.contexts) for point in points) + method.steps)
    launchers = {
        (name, rows): Launcher(plan, weights, pool.cache, table_blocks=blocks, headers=headers)
        for name, headers in kernels.items()
        for rows, plan in plans.items()
    }
    bandwidth = bandwidth_of(torch.cuda.get_device_name())
    with Watch(nvidia_smi(str(properties.uuid))) as watch:

        def measured(name: str, point: Point) -> Mapping[str, Any]:
            kernel, own = launchers[name, capacity_for(point.rows)], tables[point]
            found = measure(
                config, point, own, kernel, bandwidth=bandwidth, method=method, power=watch.between
            )
            return found.as_json()

        yield measured


if __name__ == "__main__":
    sys.exit(main())
