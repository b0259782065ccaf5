"""Times the decode kernel at North Mini Code's sizes on a GPU: random weights, every row at one context.

Prints milliseconds a step and the share of the limit, which is the time that the bytes of a step take at the
datasheet's bandwidth of an H200. Routing is what random weights make of it, close to uniform.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch

from headrace.kernel.launcher import MAX_STEPS, Launcher
from headrace.model.config import KVGroup, MoEMLP
from headrace.model.kv import BLOCK_TOKENS, KVCache, blocks_for
from headrace.model.presets import PRESETS
from headrace.model.sampling import SamplingParams
from headrace.step.isa import ROW_CAPACITIES
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import PackedWeights
from headrace.step.planner import build_plan

CONFIG = PRESETS["north-mini-code"]
BANDWIDTH = 4.8e12  # bytes a second: H200 datasheet
DEVIATION = 0.02  # of the weights
PART = 1 << 28  # elements that are filled at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROW_CAPACITIES))
    parser.add_argument("--launches", type=int, default=5)
    arguments = parser.parse_args()
    weights = random_weights()
    for rows in arguments.rows:
        milliseconds = timed(weights, rows, arguments.context, arguments.launches)
        share = step_bytes(rows, arguments.context) / BANDWIDTH * 1e3 / milliseconds
        print(f"rows {rows:2d}: {milliseconds:.3f} ms a step, {share:.1%} of the limit", flush=True)


def random_weights() -> PackedWeights:
    weights = PackedWeights(CONFIG, device="cuda", dtype=torch.bfloat16)
    part = torch.empty(PART, dtype=torch.bfloat16, device="cuda").normal_(0, DEVIATION)
    for begin in range(0, len(weights.data), PART):
        target = weights.data[begin : begin + PART]
        target.copy_(part[: len(target)])
    weights.norms.fill_(1.0)
    return weights


def step_bytes(rows: int, context: int) -> float:
    """What a step must read: weights, those of the experts that uniform routing takes, and visible KV."""
    read = float(CONFIG.vocab_size * CONFIG.hidden_size)
    heads = CONFIG.num_heads + CONFIG.num_kv_heads
    for layer in CONFIG.layers:
        read += 2 * heads * CONFIG.head_dim * CONFIG.hidden_size
        seen = context if layer.window is None else min(context, layer.window)
        read += rows * seen * 2 * CONFIG.num_kv_heads * CONFIG.head_dim
        mlp = layer.mlp
        matrices = 3 * mlp.width * CONFIG.hidden_size
        if isinstance(mlp, MoEMLP):
            active = mlp.experts * (1 - (1 - mlp.top_k / mlp.experts) ** rows)
            read += mlp.experts * CONFIG.hidden_size + active * matrices
        else:
            read += matrices
    return 2 * read


def timed(weights: PackedWeights, rows: int, context: int, launches: int) -> float:
    """Median milliseconds of a step, over launches of MAX_STEPS steps after one that warms up."""
    generator = random.Random(0)
    per = blocks_for(context + BLOCK_TOKENS)
    blocks = dict.fromkeys(KVGroup, rows * per)
    cache = KVCache(CONFIG, blocks, dtype=torch.bfloat16, device="cuda")
    for pages in cache.pages:
        pages.normal_()
    free = {group: generator.sample(range(rows * per), rows * per) for group in KVGroup}
    fed = [
        LaunchRow(
            slot=row,
            token=generator.randrange(CONFIG.vocab_size),
            position=context - 1,
            tables={group: free[group][row * per : (row + 1) * per] for group in KVGroup},
            params=SamplingParams(temperature=0),
        )
        for row in range(rows)
    ]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = Launcher(build_plan(CONFIG, rows=rows, sms=sms), weights, cache, table_blocks=per)
    times: list[float] = []
    for _ in range(launches + 1):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(kernel.stream)
        made = len(list(kernel.launch(fed, MAX_STEPS)))
        end.record(kernel.stream)
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / made)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
