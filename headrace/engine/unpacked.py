"""Layers whose matrices stay unpacked for prompts: whether that is of use, how many, and whether they fit.

All is found out before anything is allocated for them, the first before weights are read.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from functools import partial

import torch

from headrace.engine.build import available_memory, pool_tokens, size_pool
from headrace.engine.decode import kernel_obstacle
from headrace.engine.options import EngineOptions, OptionError
from headrace.model.config import ModelConfig
from headrace.step.packed_model import scratch_bytes

LONG_CONTEXT = 65536  # tokens of a conversation of a coding agent that has gone on for long
ROUNDING = 2 * 2**20  # large pieces of a GPU's memory come in multiples of so many bytes


def check_unpacked(
    options: EngineOptions, config: ModelConfig, *, decode: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise OptionError unless the model has so many layers, and is packed: where `decode` is "kernel"."""
    count, layers = options.unpacked_layers or 0, config.num_layers
    if count > layers:
        raise OptionError(
            "unpacked_layers", f"is {count}, but the model has {layers} layers; give at most {layers}"
        )
    if count and decode != "kernel":
        obstacle = kernel_obstacle(options, config, device=device, dtype=dtype)
        reason = obstacle if options.decode == "auto" else f"--decode {options.decode} was given"
        raise OptionError(
            "unpacked_layers",
            f"is {count}, but weights are packed only for the decode kernel, which does not decode here: "
            f"{reason}. Leave it out, nothing has to be unpacked",
        )


def unpacked_layers(
    options: EngineOptions,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    to_come: int = 0,
) -> int:
    """How many layers stay unpacked beside packed weights, of which `to_come` bytes are not yet on `device`:
    as many as `options` say, else what `fitting_layers` finds for a GPU.

    Raises OptionError if those that they say leave too little for prompts and the KV pool of a GPU.
    """
    if device.type != "cuda":
        return options.unpacked_layers or 0
    torch.cuda.empty_cache()  # what PyTorch keeps after packing is free, but would not count as such
    free, total = torch.cuda.mem_get_info(device)
    options = options.on_gpu(total)
    left = partial(available_memory, config, options, device=device, dtype=dtype)

    def available(taken: int) -> int:
        return left(taken=taken + to_come)

    if options.unpacked_layers is None:
        return fitting_layers(config, options, available, dtype)
    _check_room(config, options, available, dtype, free=free - to_come)
    return options.unpacked_layers


def fitting_layers(
    config: ModelConfig, options: EngineOptions, available: Callable[[int], int], dtype: torch.dtype
) -> int:
    """How many layers stay unpacked where nobody says: the most for which all of this holds, or 0.

    - They fit into half of the memory that the KV pool could have without them.
    - The pool that `size_pool` makes beside them holds `max_sequences` times LONG_CONTEXT tokens, or as many
      times a context's where that is shorter, in the blocks of its full layers.
    - No context gets shorter.
    - A pool of `kv_memory` bytes, where that was asked for, fits beside them, whatever it can hold.

    `available(taken)` is what the KV pool may take once the model has taken so many bytes beside its pages.
    """
    without = scratch_bytes(config, 0, dtype)
    most = available(without)
    _, context = _pool(config, options, most, dtype)
    if not context:
        return 0  # the engine cannot be built: building it says why
    needed = options.max_sequences * min(context, LONG_CONTEXT)

    def fits(layers: int) -> bool:
        taken = scratch_bytes(config, layers, dtype)
        left = available(taken + (layers + 2) * ROUNDING)
        tokens, longest = _pool(config, options, left, dtype)
        enough = tokens >= needed if options.kv_memory is None else left >= options.kv_memory
        return taken - without <= most // 2 and enough and longest == context

    return max((layers for layers in range(1, config.num_layers + 1) if fits(layers)), default=0)


def _pool(config: ModelConfig, options: EngineOptions, available: int, dtype: torch.dtype) -> tuple[int, int]:
    """Tokens that a pool of so many bytes, or of `kv_memory`, holds, and its longest context; 0, 0 if it
    cannot hold one."""
    try:
        sizes, context = size_pool(config, options, available=available, dtype=dtype)
    except OptionError:
        return 0, 0
    return pool_tokens(sizes), context


def _check_room(
    config: ModelConfig,
    options: EngineOptions,
    available: Callable[[int], int],
    dtype: torch.dtype,
    *,
    free: int,
) -> None:
    """Raise OptionError if the layers leave too little for prompts and the KV pool that is asked for, or a
    least one."""
    count = options.unpacked_layers or 0

    def fits(layers: int) -> bool:
        left = available(scratch_bytes(config, layers, dtype))
        enough = options.kv_memory is None or options.kv_memory <= left
        return enough and _pool(config, options, left, dtype)[1] > 0

    if not count or fits(count):
        return
    taken = scratch_bytes(config, count, dtype) - scratch_bytes(config, 0, dtype)
    most = bisect.bisect_left(range(count), True, key=lambda layers: not fits(layers)) - 1
    advice = f"give at most {most}" if most > 0 else "leave it out"
    raise OptionError(
        "unpacked_layers",
        f"is {count}: these layers take {taken / 2**30:.1f} GiB of the {free / 2**30:.1f} GiB that are free "
        f"beside the packed weights, and leave too little for prompts and the KV cache; {advice}, or ask for "
        "less by --kv-memory, --max-context or --prefill-chunk",
    )
