"""Times prompts on a GPU: tokens a second from the first chunk to the last, at North Mini Code's shape.

Weights are synthetic and packed, blocks of the KV pool scattered. `--profile` adds the largest single costs
of one pass, `--parts` times a layer's parts alone with the share of the GPU's peak that they reach,
`--beginnings` what a pass begins with, by `tools.time_beginnings`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from headrace.engine.decode import fuse
from headrace.engine.torch_backend import TorchBackend
from headrace.kernel.prompt import passes
from headrace.kernel.prompt.passes import Passes
from headrace.model import tiled
from headrace.model.batch import Span
from headrace.model.config import KVGroup, ModelConfig, MoEMLP
from headrace.model.kv import KVCache, blocks_for
from headrace.model.layers import group, route, spread, swiglu, weighed_sum
from headrace.model.synthetic import preset
from headrace.model.transformer import Model
from headrace.model.varlen import attend_varlen, plan_varlen
from headrace.step.pack import PackedWeights, pack_synthetic
from headrace.step.packed_model import packed_model
from tools import time_beginnings

PEAK = 989e12  # operations a second in bfloat16: H200 datasheet, without sparsity
BANDWIDTH = 4.8e12  # bytes a second: H200 datasheet
ROUNDS = 8


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
        parts(config, weights, max(options.chunk))


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


def parts(config: ModelConfig, weights: PackedWeights, tokens: int) -> None:
    """A layer's products and attention, alone."""
    layer = next(i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoEMLP))
    mlp = config.layers[layer].mlp
    assert isinstance(mlp, MoEMLP)
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim

    def random_values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    h, slots = random_values(tokens, hidden), tokens * mlp.top_k
    q = random_values(tokens, heads, dim)
    k, v = (random_values(tokens, config.num_kv_heads, dim) for _ in "kv")
    gate_up, down = (
        random_values(mlp.experts, 2 * mlp.width, hidden),
        random_values(mlp.experts, hidden, mlp.width),
    )
    ends = torch.arange(1, mlp.experts + 1, device="cuda", dtype=torch.int32) * (slots // mlp.experts)
    rows, inner = random_values(slots, hidden), random_values(slots, mlp.width)
    square, wide = random_values(heads * dim, hidden), random_values(config.num_kv_heads * dim, hidden)
    matrix = f"blocks.{layer}.mlp.experts.gate_up"
    scores = torch.randn(tokens, mlp.experts, device="cuda")

    device = torch.device("cuda")
    fused = Passes() if passes.fits(config) else None
    past = tokens if config.window is None else max(tokens, config.window)
    pages = random_values(blocks_for(past) + blocks_for(tokens), config.num_kv_heads, 2, 64 * dim)

    def attention(window: int | None, tile: int | None, start: int = 0) -> Callable[[], object]:
        tables = dict.fromkeys(KVGroup, range(len(pages)))
        plan = plan_varlen([Span(range(tokens), start, tables)], KVGroup.FULL, window, device, tile)
        return lambda: attend_varlen(q, k, v, pages, plan, fused)

    def cudnn(queries: int, keys: int, *, causal: bool, count: int = 1) -> Callable[[], object]:
        given = q[: count * queries], k[: count * keys], v[: count * keys]
        return lambda: tiled.cudnn(*given, causal=causal, joined=True, count=count)

    pairs = tokens * (tokens + 1) / 2
    window = config.window or tokens
    seen = pairs - max(tokens - window, 0) * (max(tokens - window, 0) + 1) / 2
    per_pair = 4 * heads * dim
    product = 2.0 * hidden
    show("q", lambda: functional.linear(h, square), product * tokens * heads * dim)
    show("k", lambda: functional.linear(h, wide), product * tokens * config.num_kv_heads * dim)
    show(
        "experts up",
        lambda: functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends),
        product * slots * 2 * mlp.width,
    )
    show(
        "experts down",
        lambda: functional.grouped_mm(inner, down.transpose(1, 2), offs=ends),
        product * slots * mlp.width,
    )
    far, wide_seen = tokens * past + pairs, tokens * window
    for name, tile in (("flash", None), ("tiles", tiled.TILE)):
        show(f"{name}, full", attention(None, tile), per_pair * pairs)
        show(f"{name}, window", attention(window, tile), per_pair * seen)
        show(f"{name}, full, past of {past}", attention(None, tile, past), per_pair * far)
        show(f"{name}, window, past of {past}", attention(window, tile, past), per_pair * wide_seen)
    half = tokens // 2
    show("cudnn, causal, half", cudnn(half, half, causal=True), per_pair * half * half / 2)
    show("cudnn, causal, half less 1", cudnn(half - 1, half - 1, causal=True), per_pair * half * half / 2)
    show("cudnn, causal, two halves", cudnn(half, half, causal=True, count=2), per_pair * half * half)
    show("cudnn, rectangle", cudnn(tokens, tokens, causal=False), per_pair * tokens * tokens)
    begun = time.monotonic()
    cudnn(half - 3, half - 3, causal=True)()
    torch.cuda.synchronize()
    print(f"cudnn, the first of a shape: {1e3 * (time.monotonic() - begun):.0f} ms")
    ids, _ = route(scores, mlp, fused)
    places, _ = (fused.group if fused else group)(ids, mlp.experts)
    slot_weights, gate_up_rows = torch.rand(ids.shape, device="cuda"), random_values(slots, 2 * mlp.width)
    show("experts chosen", lambda: route(scores, mlp, fused), moved=scores.nbytes)
    show("slots placed", lambda: (fused.group if fused else group)(ids, mlp.experts), moved=2.0 * ids.nbytes)
    show("rows spread", lambda: (fused.spread if fused else spread)(h, places), moved=h.nbytes + rows.nbytes)
    show(
        "silu times up",
        lambda: (fused.swiglu if fused else swiglu)(gate_up_rows),
        moved=1.5 * gate_up_rows.nbytes,
    )
    show(
        "rows combined",
        lambda: (fused.combine if fused else weighed_sum)(rows, places, slot_weights),
        moved=h.nbytes + rows.nbytes,
    )
    show("unpacking up", lambda: weights.unpack(matrix, gate_up), moved=2.0 * gate_up.nbytes)


def show(what: str, work: Callable[[], object], operations: float = 0, moved: float = 0) -> None:
    """Print the time of some work, and its share of what the GPU can do; or why it cannot be done.

    ROUNDS of it follow one another, so that the host's part of the time hides behind the GPU's.
    """
    try:
        work()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(ROUNDS):
                work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / ROUNDS)
    except RuntimeError as error:
        print(f"{what}: {error}")
        return
    seconds = statistics.median(times)
    rate = (
        f"{operations / seconds / 1e12:.0f} TFLOP/s" if operations else f"{moved / seconds / 1e12:.2f} TB/s"
    )
    share = operations / seconds / PEAK if operations else moved / seconds / BANDWIDTH
    print(f"{what}: {1e3 * seconds:.3f} ms, {rate}, {share:.0%} of the peak", flush=True)


if __name__ == "__main__":
    main()
