"""Layers whose matrices stay unpacked for prompts: whether that is of use, and whether they fit.

Both are checked before anything is allocated for them, the first before weights are read.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from headrace.engine.build import available_memory, size_pool
from headrace.engine.decode import kernel_obstacle
from headrace.engine.options import EngineOptions, OptionError
from headrace.model.config import ModelConfig
from headrace.step.packed_model import scratch_bytes


def check_unpacked(
    options: EngineOptions, config: ModelConfig, *, decode: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise OptionError unless the model has so many layers, and is packed: where `decode` is "kernel"."""
    count, layers = options.unpacked_layers, config.num_layers
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


def check_room(
    options: EngineOptions, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise OptionError if unpacked layers leave too little for prompts and the KV pool, on a GPU that holds
    the packed weights but not yet these layers."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    count, fits = options.unpacked_layers, _fitting(options.on_gpu(total), config, device, dtype)
    if fits(count):
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


def _fitting(
    options: EngineOptions, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Callable[[int], bool]:
    """Of a number of unpacked layers, whether the KV pool that is asked for, or a least one, fits beside."""

    def fits(layers: int) -> bool:
        taken = scratch_bytes(config, layers, dtype)
        available = available_memory(config, options, device=device, dtype=dtype, taken=taken)
        if options.kv_memory is not None and options.kv_memory > available:
            return False
        try:
            size_pool(config, options, available=available, dtype=dtype)
        except OptionError:
            return False
        return True

    return fits
