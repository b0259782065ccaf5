"""From options to an engine: how large the KV pool is, which backend decodes, what fits."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from headrace.engine.backend import DecodeBackend, Prefiller
from headrace.engine.blocks import BlockManager
from headrace.engine.engine import Engine
from headrace.engine.options import EngineOptions, OptionError
from headrace.engine.oracle_backend import OracleBackend
from headrace.engine.scheduler import Scheduler
from headrace.engine.torch_backend import TorchBackend
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import BLOCK_TOKENS, KVCache, block_bytes, blocks_for
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from headrace.step.errors import PlanError
from headrace.step.isa import MAX_ROWS
from headrace.step.sizes import check_model


def build_engine(model: Model, tokenizer: Tokenizer, options: EngineOptions) -> Engine:
    """An engine over `model`, its KV pool allocated on the model's device.

    Raises OptionError if the pool that `options` allow cannot hold one sequence, or if the backend that they
    name cannot run the model.
    """
    parameter = next(model.parameters())
    sizes, max_context = size_pool(
        model.config, options, available=_available_memory(parameter.device), dtype=parameter.dtype
    )
    cache = KVCache(model.config, sizes, dtype=parameter.dtype, device=parameter.device)
    backend = _make_backend(model, cache, options)
    backend.prepare()
    return assemble_engine(
        backend=backend,
        prefiller=backend,
        tokenizer=tokenizer,
        config=model.config,
        sizes=sizes,
        max_context=max_context,
        options=options,
    )


def _make_backend(model: Model, cache: KVCache, options: EngineOptions) -> TorchBackend | OracleBackend:
    if options.decode == "torch":
        return TorchBackend(model, cache, max_rows=options.max_sequences, max_steps=options.steps)
    if options.max_sequences > MAX_ROWS:
        raise OptionError(
            "max_sequences", f"is {options.max_sequences}; the oracle decodes at most {MAX_ROWS} at a time"
        )
    if model.device.type != "cpu":
        raise OptionError("decode", "the oracle runs on a CPU only; run the model there with --device cpu")
    try:
        check_model(model.config)
    except PlanError as error:
        raise OptionError("decode", f"the oracle cannot run this model: {error}") from error
    return OracleBackend(model, cache, max_rows=options.max_sequences, max_steps=options.steps)


def size_pool(
    config: ModelConfig, options: EngineOptions, *, available: int, dtype: torch.dtype
) -> tuple[dict[KVGroup, int], int]:
    """Blocks of each group, and the context that they allow.

    The sliding layers of one sequence never hold more than a window, the chunk or call under way, and the
    blocks that these begin and end in; beyond that for every sequence, all memory goes to the full layers.

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
    sliding = _sliding_blocks(config, options)
    most = options.max_sequences * blocks_for(wanted)
    blocks = _fit(costs, sliding, most, budget)
    context = min(wanted, blocks * BLOCK_TOKENS)
    least = min(wanted, options.max_context or 2 * BLOCK_TOKENS)
    if context < least:
        needed = sum(cost * blocks_for(least) for cost in costs.values())
        raise OptionError(
            "kv_memory",
            f"{budget / 2**20:.0f} MiB hold {context} tokens of KV, but {least} need "
            f"{needed / 2**20:.0f} MiB; give more memory or a smaller max_context",
        )
    sizes = {group: blocks if group is KVGroup.FULL else min(blocks, sliding) for group in costs}
    return sizes, context


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
        BlockManager(sizes, window=config.window),
        max_sequences=options.max_sequences,
        chunk_tokens=options.prefill_chunk,
        max_steps=min(options.steps, backend.max_steps),
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


def _sliding_blocks(config: ModelConfig, options: EngineOptions) -> int:
    if config.window is None:
        return 0
    resting = blocks_for(config.window) + 1 + blocks_for(options.steps)
    return options.max_sequences * resting + blocks_for(options.prefill_chunk) + 1


def _fit(costs: Mapping[KVGroup, int], sliding: int, most: int, budget: int) -> int:
    """The largest n <= most such that n full blocks and min(n, sliding) sliding blocks cost at most budget.

    In a model that has only sliding layers n counts positions that need no memory beyond the window.
    """
    full_cost, sliding_cost = costs.get(KVGroup.FULL, 0), costs.get(KVGroup.SLIDING, 0)
    together = budget // (full_cost + sliding_cost)
    if together <= sliding or not sliding_cost:
        return min(most, together)
    if not full_cost:
        return most
    return min(most, (budget - sliding * sliding_cost) // full_cost)


def _available_memory(device: torch.device) -> int:
    """Bytes that the KV pool may take: most of what is free on a GPU, a part of it on a shared host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.25)
    return 2**31
