"""What the first prompts on a GPU would have to wait for, done beforehand.

cuDNN makes a plan for every shape, tens of milliseconds each, and loads libraries for the first one; PyTorch
and CUDA load kernels when these are first used; memory is taken from the driver piece by piece. The products
of a first layer took 11 ms for some numbers of tokens that had not come before, 2 for others, and 0.5 the
second time: loading a kernel, as it seems. The first odd number was among the dear ones (`tools.time_prefill
--beginnings`). Beside running answers each of these is a gap. PyTorch keeps cuDNN's plans, and cuBLAS's
workspaces, by thread: so this is for the engine's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from headrace.model import tiled
from headrace.model.batch import Span
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import KVCache, blocks_for

logger = logging.getLogger(__name__)

FEWEST = 64  # tokens of the smallest pass
TIMED = (64, 512, 2048, 8192)  # tokens of passes whose cost is told

Run = Callable[[Span, int], None]  # a pass over a span, of so many of its layers, up to its end


def rehearse(
    config: ModelConfig, cache: KVCache, run: Run, *, tokens: int, context: int
) -> list[tuple[int, float]]:
    """As `backend.Rehearsing.rehearse`. The passes write to block 0, which is cleared."""
    device, begun = cache.pages[0].device, time.perf_counter()
    shapes = plan_attention(config, device, cache.pages[0].dtype, tokens=tokens, context=context)
    planned = time.perf_counter()
    for span in spans(config, tokens=tokens, context=context):
        run(span, distinct_layers(config))
    ran = time.perf_counter()
    sizes = [count for count in TIMED if count <= min(tokens, context)]
    timed = [(count, _time(run, _span(config, 0, count), config)) for count in sizes]
    for pages in cache.pages:
        pages[0] = 0
    logger.info(
        "prompts were rehearsed in %.1f s: %d plans of cuDNN in %.1f s, passes in %.1f s; passes of %s",
        time.perf_counter() - begun, shapes, planned - begun, ran - planned,
        ", ".join(f"{count} tokens take {1e3 * seconds:.0f} ms" for count, seconds in timed),
    )  # fmt: skip
    if device.type == "cuda":
        _log_memory(device)
    return timed


def _log_memory(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    logger.info(
        "the largest pass took %.2f GiB; PyTorch keeps %.2f GiB for the next, and %.2f GiB are free",
        (peak - used) / 2**30, (torch.cuda.memory_reserved(device) - used) / 2**30, free / 2**30,
    )  # fmt: skip


def plan_attention(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, tokens: int, context: int
) -> int:
    """Have cuDNN plan every shape of attention that chunks can bring; how many there are."""
    tile = tiled.tile_for(device, dtype, config.head_dim)
    windows = {layer.window for layer in config.layers}
    if tile is None:
        return 0
    shapes = {shape for window in windows for shape in tiled.shapes(tokens, context, window, tile)}
    for shape in sorted(shapes, key=lambda shape: (shape.queries, shape.keys)):
        queries, keys = shape.count * shape.queries, shape.count * shape.keys
        q = torch.zeros(queries, config.num_heads, config.head_dim, dtype=dtype, device=device)
        k = torch.zeros(keys, config.num_kv_heads, config.head_dim, dtype=dtype, device=device)
        tiled.cudnn(q, k, k, causal=shape.causal, joined=shape.joined, count=shape.count)
    torch.cuda.synchronize(device)  # so that the time is that of the plans
    torch.cuda.reset_peak_memory_stats(device)
    return len(shapes)


def spans(config: ModelConfig, *, tokens: int, context: int) -> list[Span]:
    """Passes of all sizes that kernels are chosen by, even and odd, and of chunks that go from tile to tile.

    First comes the largest, after the longest past: the memory that it takes serves the others, too.
    """
    most = min(tokens, context)
    powers = {FEWEST << power for power in range((most // FEWEST).bit_length())}
    odd = {size - 1 for size in powers}
    sizes = sorted(powers | odd | set(range(tiled.TILE, most + 1, tiled.TILE)))
    beginning = [_span(config, 0, size) for size in sizes]
    later = [_span(config, size // 2 + 1, size) for size in sizes if size // 2 + 1 + size <= context]
    return [_span(config, context - most, most), *beginning, *later]


def distinct_layers(config: ModelConfig) -> int:
    """How many layers, from the first on, have one of every kind among them."""
    return max(config.layers.index(layer) for layer in config.layers) + 1


def _span(config: ModelConfig, start: int, count: int) -> Span:
    """Tokens that differ, so that they go to all experts, all of them in block 0."""
    table: Sequence[int] = [0] * blocks_for(start + count)
    ids = [7 * index % config.vocab_size for index in range(count)]
    return Span(ids, start, dict.fromkeys(KVGroup, table))


def _time(run: Run, span: Span, config: ModelConfig) -> float:
    """Seconds of a whole pass, the second of two."""
    run(span, config.num_layers)
    begun = time.perf_counter()
    run(span, config.num_layers)
    return time.perf_counter() - begun
