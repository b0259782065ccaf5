"""From options to an engine: how large the KV pool is, which backend decodes, what fits."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from headrace.engine.backend import DecodeBackend, LayeredPrefiller, Prefiller, takes_several_rows
from headrace.engine.blocks import BlockManager
from headrace.engine.decode import choose_decode, kernel_obstacle, make_backend
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.pace import Pace
from headrace.engine.scheduler import Scheduler
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import BLOCK_TOKENS, KVCache, block_bytes, blocks_for
from headrace.model.memory import prompt_bytes
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.packed_model import scratch_bytes

# A cached conversation of a coding agent: how long it is, and how many tails it keeps (prompt and turn end).
CONVERSATION_TOKENS = 32768
CONVERSATION_TAILS = 2


def build_engine(
    model: Model,
    tokenizer: Tokenizer,
    options: EngineOptions,
    *,
    weights: PackedWeights | None = None,
    unpacked: int = 0,
    say: Callable[[str], None] | None = None,
) -> Engine:
    """An engine over `model`, its KV pool allocated on the model's device.

    `weights` are the model's own pages if it has been packed; the kernel has a model that is not packed anew,
    beside it. `unpacked` layers of it keep their matrices unpacked, whatever `options` asked for. `say` gets
    a line for each part of the start that takes time, and for what these layers cost.

    Raises OptionError if the pool that `options` allow cannot hold one sequence, or if the backend that they
    name cannot run the model; BuildError or DeviceError if the kernel cannot be compiled or loaded.
    """
    device, dtype = model.device, model.dtype
    if device.type == "cuda":
        options = options.on_gpu(torch.cuda.mem_get_info(device)[1])
    decode = choose_decode(options, model.config, device=device, dtype=dtype)
    if say is not None and decode == "torch" != options.decode and device.type == "cuda":
        reason = kernel_obstacle(options, model.config, device=device, dtype=dtype)
        say(f"Decoding with PyTorch and not the kernel: {reason}")
    chosen = options.unpacked_layers is None and weights is not None and device.type == "cuda"
    options = replace(options, unpacked_layers=unpacked)
    if say is not None and (unpacked or chosen):
        present = scratch_bytes(model.config, unpacked, dtype)
        left = partial(available_memory, model.config, options, device=device, dtype=dtype)
        say(told_unpacked(model.config, options, lambda taken: left(taken=taken - present), dtype))
    if decode == "kernel" and weights is None:
        weights = pack_model(model, device=device, dtype=dtype)
    available = available_memory(model.config, options, device=device, dtype=dtype)
    sizes, max_context = size_pool(model.config, options, available=available, dtype=dtype)
    cache = KVCache(model.config, sizes, dtype=dtype, device=device)
    backend, prefiller = make_backend(
        decode, model, cache, options, weights=weights, max_context=max_context, say=say
    )
    backend.prepare()
    return assemble_engine(
        backend=backend,
        prefiller=prefiller,
        tokenizer=tokenizer,
        config=model.config,
        sizes=sizes,
        max_context=max_context,
        options=options,
    )


def size_pool(
    config: ModelConfig, options: EngineOptions, *, available: int, dtype: torch.dtype
) -> tuple[dict[KVGroup, int], int]:
    """Blocks of each group, and the context that they allow.

    The sliding layers of one running sequence never hold more than a window, the chunk or call under way, and
    the blocks that these begin and end in. What memory there is beyond that for every sequence goes to the
    full layers and, with a prefix cache, to the tails that the cached sequences need beside them.

    Raises OptionError if not even one sequence fits.
    """
    budget = available if options.kv_memory is None else options.kv_memory
    wanted = min(options.max_context or config.max_positions, config.max_positions)
    if options.max_context is not None and options.max_context > config.max_positions:
        raise OptionError(
            "max_context",
            f"is {options.max_context}, but the model was made for at most {config.max_positions} tokens",
        )
    costs = {
        group: block_bytes(config, group, dtype.itemsize) for group in KVGroup if config.layers_in(group)
    }
    # Twice what can run at once: with a cache as much again is worth having, without one it is not.
    most = options.max_sequences * blocks_for(wanted) * (2 if options.prefix_cache else 1)

    def sizes_for(blocks: int) -> dict[KVGroup, int]:
        sliding = min(blocks, _sliding_blocks(config, options, blocks))
        return {group: blocks if group is KVGroup.FULL else sliding for group in costs}

    def fits(blocks: int) -> bool:
        return sum(costs[group] * count for group, count in sizes_for(blocks).items()) <= budget

    blocks = bisect.bisect_left(range(1, most + 1), True, key=lambda blocks: not fits(blocks))
    context = min(wanted, blocks * BLOCK_TOKENS)
    least = min(wanted, options.max_context or 2 * BLOCK_TOKENS)
    if context < least:
        needed = sum(cost * blocks_for(least) for cost in costs.values())
        unpacked = ", fewer unpacked_layers" if options.unpacked_layers else ""
        raise OptionError(
            "kv_memory",
            f"is {budget / 2**20:.0f} MiB here, which hold {context:,} tokens of KV, but {least:,} need "
            f"{needed / 2**20:.0f} MiB; give more memory{unpacked} or a smaller max_context",
        )
    return sizes_for(blocks), context


def pool_tokens(sizes: Mapping[KVGroup, int]) -> int:
    """How many tokens a pool of so many blocks holds: those of its full layers, which have the most."""
    return max(sizes.values()) * BLOCK_TOKENS


def assemble_engine(
    *,
    backend: DecodeBackend,
    prefiller: Prefiller,
    tokenizer: Tokenizer,
    config: ModelConfig,
    sizes: Mapping[KVGroup, int],
    max_context: int,
    options: EngineOptions,
) -> Engine:
    """An engine from its parts."""
    scheduler = Scheduler(
        BlockManager(sizes, window=config.window, prefix_cache=options.prefix_cache),
        pace=Pace(
            most=options.chunk,
            gap=options.max_decode_gap / 1000,
            layered=isinstance(prefiller, LayeredPrefiller),
        ),
        max_sequences=options.max_sequences,
        max_steps=min(options.steps, backend.max_steps),
        riding_rows=backend.max_rows if takes_several_rows(backend) else 0,
    )
    return Engine(
        backend=backend,
        prefiller=prefiller,
        scheduler=scheduler,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        max_context=max_context,
        queue=options.queue,
    )


def _sliding_blocks(config: ModelConfig, options: EngineOptions, full: int) -> int:
    """What the sliding layers need beside `full` blocks of the full layers."""
    if config.window is None:
        return 0
    resting = blocks_for(config.window) + 2 + blocks_for(options.steps)
    running = options.max_sequences * resting + blocks_for(options.chunk) + 1
    if not options.prefix_cache:
        return running
    conversations = -(-full * BLOCK_TOKENS // CONVERSATION_TOKENS)
    return running + conversations * CONVERSATION_TAILS * (blocks_for(config.window) + 1)


def available_memory(
    config: ModelConfig, options: EngineOptions, *, device: torch.device, dtype: torch.dtype, taken: int = 0
) -> int:
    """Bytes that the KV pool may take, once `taken` more than now are: what is free on a GPU but for what
    prompts need, a part of it on a host.

    A tenth is left free in any case: kernels have buffers of their own.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - taken
        return max(0, min(int(free * 0.9), free - _reserve(config, options, dtype)))
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.25)
    return 2**31


def told_unpacked(
    config: ModelConfig, options: EngineOptions, available: Callable[[int], int], dtype: torch.dtype
) -> str:
    """For the log: what `options.unpacked_layers` take, and what the KV pool has beside and without them.

    `available(taken)` is what the pool may take once the model has taken so many bytes beside its pages.
    """
    layers = options.unpacked_layers or 0
    if not layers:
        return "No layers stay unpacked for prompts: the KV cache needs the memory"
    taken, without = scratch_bytes(config, layers, dtype), scratch_bytes(config, 0, dtype)
    own = (taken - without) / 2**30
    sizes, context = size_pool(config, options, available=available(taken), dtype=dtype)
    largest, _ = size_pool(config, options, available=available(without), dtype=dtype)
    pool = sum(blocks * block_bytes(config, group, dtype.itemsize) for group, blocks in sizes.items())
    tokens, most = pool_tokens(sizes), pool_tokens(largest)
    return (
        f"{layers} of {config.num_layers} layers stay unpacked for prompts, in {own:.1f} GiB; the KV cache "
        f"has {pool / 2**30:.1f} GiB for {tokens:,} tokens, {most - tokens:,} fewer than without them, and "
        f"for contexts of up to {context:,} tokens"
    )


def _reserve(config: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Bytes that prompts need beside the pool: half as much again as one pass, for what lies in pieces."""
    context = min(options.max_context or config.max_positions, config.max_positions)
    tokens = min(options.chunk, context)
    return prompt_bytes(config, tokens=tokens, context=context, dtype=dtype) * 3 // 2
