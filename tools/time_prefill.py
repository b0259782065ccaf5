"""Times prompts on a GPU: tokens a second from the first chunk to the last, at North Mini Code's shape.

Weights are synthetic and packed, blocks of the KV pool scattered. `--profile` adds the largest single costs
of one pass, `--parts` times a layer's parts alone, by `tools.time_parts`, `--beginnings` what a pass begins
with, by `tools.time_beginnings`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace

import torch

from headrace.engine.decode import fuse
from headrace.engine.torch_backend import TorchBackend
from headrace.kernel.prompt.passes import Passes
from headrace.model import tiled
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import KVCache, blocks_for
from headrace.model.synthetic import preset
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights, pack_synthetic
from headrace.step.packed_model import packed_model
from tools import time_beginnings, time_parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="north-mini-code")
    parser.add_argument("--layers", type=int, help="only the first so many")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--chunk", type=int, nargs="*", default=[8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="without the fused steps")
    parser.add_argument("--flash", action="store_true", help="without cuDNN's attention")
    parser.add_argument("--level", action="store_true", help="no priority over the unpacking of weights")
    parser.add_argument("--unpack-blocks", type=int, help="few leave multiprocessors to the pass")
    parser.add_argument("--unpack-threads", type=int, default=Passes.unpack_threads, help="of each block")
    parser.add_argument("--kept", type=int, default=0, help="layers whose weights stay unpacked, too")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--beginnings", action="store_true", help="first layers of small chunks, and why")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("Prompts are timed on a GPU, and PyTorch sees none here.")
    config = preset(options.shape)
    config = replace(config, layers=config.layers[: options.layers])
    if options.flash:
        tiled.LEAST = sys.maxsize
    Passes.unpack_blocks, Passes.unpack_threads = options.unpack_blocks, options.unpack_threads
    begun = time.monotonic()
    weights = pack_synthetic(config, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    print(f"{weights.map.bytes / 1e9:.1f} GB of weights in {time.monotonic() - begun:.1f} s", flush=True)
    model = packed_model(weights, kept=options.kept)
    most = max([*options.tokens, time_beginnings.MOST if options.beginnings else 0])
    timer = Timer(model, weights, most, not options.plain, options.level)
    for tokens in options.tokens:
        for chunk in options.chunk:
            timer.report(tokens, chunk, options.repeats)
    if options.profile:
        timer.profile(min(options.tokens), max(options.chunk))
    if options.beginnings:
        timer.beginnings(max(options.chunk))
    if options.parts:
        time_parts.report(config, weights, max(options.chunk))


class Timer:
    """A model with a KV pool for one prompt."""

    def __init__(self, model: Model, weights: PackedWeights, most: int, fused: bool, level: bool) -> None:
        blocks, config = blocks_for(most), weights.config
        generator = random.Random(0)
        cache = KVCache(config, dict.fromkeys(KVGroup, blocks), dtype=torch.bfloat16, device="cuda")
        self.tables = {group: generator.sample(range(blocks), blocks) for group in KVGroup}
        self.prompt = [generator.randrange(config.vocab_size) for _ in range(most)]
        if fused:
            print("fused steps are taken" if fuse(model, cache, weights) else "fused steps cannot be taken")
        self.model = model
        self.backend = TorchBackend(model, cache, max_rows=1, ahead=not level)

    def run(self, tokens: int, chunk: int) -> list[float]:
        """Seconds of each chunk."""
        seconds = []
        for start in range(0, tokens, chunk):
            span = Span(self.prompt[start : min(start + chunk, tokens)], start, self.tables)
            begun = time.monotonic()
            self.backend.prefill([span])
            seconds.append(time.monotonic() - begun)
        return seconds

    def report(self, tokens: int, chunk: int, repeats: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        runs = [self.run(tokens, chunk) for _ in range(repeats + 1)][1:]
        rate = statistics.median(tokens / sum(run) for run in runs)
        peak = torch.cuda.max_memory_allocated() / 2**30
        each = " ".join(f"{1e3 * statistics.median(part):.1f}" for part in zip(*runs, strict=True))
        print(
            f"{tokens} tokens by {chunk}: {rate:,.0f} tokens/s; ms by chunk: {each}; {peak:.1f} GiB at most"
        )

    def profile(self, tokens: int, chunk: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.run(tokens, chunk)
        print(
            profile.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90
            )
        )

    def beginnings(self, chunk: int) -> None:
        """As in a server that has rehearsed chunks of up to so many tokens."""
        self.backend.rehearse(tokens=chunk, context=len(self.prompt))
        time_beginnings.report(self.backend, self.model, self.prompt, self.tables)


if __name__ == "__main__":
    main()
