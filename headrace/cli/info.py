"""`headrace info`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from headrace.cli import console
from headrace.cli.options import ModelFlags, config_of
from headrace.engine.options import EngineOptions

if TYPE_CHECKING:
    import torch

    from headrace.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that the model would run on. `memory` and `free` are bytes."""

    name: str
    memory: int
    free: int
    is_hopper: bool


def info(
    model: ModelFlags,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a sequence, to tell its memory. Default: what the model was made for.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tell what a checkpoint is, what it needs in memory, and whether this machine can run it.

    Only the configuration is read, not the weights.

    Example: headrace info --synthetic north-mini-code --context 32768
    """
    from headrace.engine.decode import choose_decode
    from headrace.load import choose_device, choose_dtype

    name, config = _identify(model)
    device = choose_device(model.device)
    dtype = choose_dtype(model.dtype, device)
    machine = look_at(device)
    tokens = min(context or config.max_positions, config.max_positions)
    console.out.print(_about_model(name, config, dtype, tokens))
    decode = choose_decode(EngineOptions(), config, device=device, dtype=dtype)
    unpacked = _unpacked(config, device, dtype) if decode == "kernel" else None
    console.out.print(_about_machine(machine, config, dtype, tokens, decode, unpacked))


def _identify(model: ModelFlags) -> tuple[str, ModelConfig]:
    """What the user means, and its configuration."""
    from headrace.load import resolve

    config = config_of(model.model, model.synthetic)
    if model.model is None:
        return f"{model.synthetic} (synthetic weights)", config
    return f"{model.model} ({resolve(model.model)})", config


def look_at(device: torch.device) -> Machine:
    """The machine's side of `device`."""
    import torch

    from headrace.model.hopper import on_hopper

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Machine(torch.cuda.get_device_name(device), total, free, on_hopper(device))
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return Machine(f"CPU, {os.cpu_count()} cores", total, free, is_hopper=False)


def _about_model(name: str, config: ModelConfig, dtype: torch.dtype, tokens: int) -> Table:
    from headrace.model import memory

    table = _table("Model")
    table.add_row("Name", name)
    table.add_row("Family", config.family)
    table.add_row("Layers", _layers(config))
    table.add_row("Width", _width(config))
    table.add_row("Vocabulary", f"{config.vocab_size:,} tokens")
    table.add_row("Context", f"{config.max_positions:,} tokens")
    parameters, active = memory.parameter_count(config), memory.active_parameter_count(config)
    routed = f", of which a token uses {_count(active)}" if active < parameters else ""
    table.add_row("Parameters", f"{_count(parameters)} ({parameters:,}){routed}")
    table.add_row("Weights", f"{size(memory.weight_bytes(config, dtype))} in {_dtype(dtype)}")
    table.add_row("KV per token", _kv_per_token(config, dtype))
    table.add_row("KV per sequence", f"{size(memory.kv_bytes(config, tokens, dtype))} at {tokens:,} tokens")
    return table


def _about_machine(
    machine: Machine,
    config: ModelConfig,
    dtype: torch.dtype,
    tokens: int,
    decode: str,
    unpacked: str | None,
) -> Table:
    from headrace.model import memory

    needed = memory.weight_bytes(config, dtype) + memory.kv_bytes(config, tokens, dtype)
    table = _table("This machine")
    table.add_row("Device", machine.name)
    table.add_row("Memory", f"{size(machine.memory)}, {size(machine.free)} free")
    table.add_row("Hopper GPU", "yes" if machine.is_hopper else "no")
    table.add_row("Decode backend", decode)
    if unpacked is not None:
        table.add_row("Prompts", unpacked)
    table.add_row("Needed", f"{size(needed)} for the weights and one sequence of {tokens:,} tokens")
    table.add_row("Runs here", _verdict(machine, needed, memory.weight_bytes(config, dtype)))
    return table


def _unpacked(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """What a server with the default options would say of unpacked layers, by the memory that is free now."""
    import torch

    from headrace.engine.build import available_memory, told_unpacked
    from headrace.engine.unpacked import unpacked_layers
    from headrace.step.weights import weight_map

    pages = weight_map(config).bytes
    options = EngineOptions().on_gpu(torch.cuda.mem_get_info(device)[1])
    layers = unpacked_layers(options, config, device=device, dtype=dtype, to_come=pages)
    options = replace(options, unpacked_layers=layers)

    def available(taken: int) -> int:
        return available_memory(config, options, device=device, dtype=dtype, taken=taken + pages)

    return told_unpacked(config, options, available, dtype)


def _verdict(machine: Machine, needed: int, weights: int) -> str:
    if needed <= machine.free:
        return "yes"
    if needed <= machine.memory:
        return "yes, once other programs have given back their memory"
    if weights < machine.memory:
        return "only with a shorter context: try --context with fewer tokens"
    return "no: the weights alone are larger than the memory"


def _table(title: str) -> Table:
    value = Column(overflow="fold")  # a long path is of use only as a whole
    return Table(
        "", value, title=title, title_justify="left", title_style="bold", show_header=False, box=None
    )


def _layers(config: ModelConfig) -> str:
    from headrace.model.config import KVGroup, MoEMLP

    full, sliding = (len(config.layers_in(group)) for group in (KVGroup.FULL, KVGroup.SLIDING))
    attention = (
        f", {full} see everything and {sliding} a window of {config.window:,} tokens" if sliding else ""
    )
    experts = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoEMLP)]
    mixture = f"; {len(experts)} with {experts[0].experts} experts, top {experts[0].top_k}" if experts else ""
    return f"{config.num_layers}{attention}{mixture}"


def _width(config: ModelConfig) -> str:
    heads = f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    return f"{config.hidden_size}, {heads}"


def _kv_per_token(config: ModelConfig, dtype: torch.dtype) -> str:
    from headrace.model.config import KVGroup
    from headrace.model.memory import kv_bytes_per_token

    whole = f"{size(kv_bytes_per_token(config, KVGroup.FULL, dtype))}"
    if config.window is None:
        return whole
    within = size(kv_bytes_per_token(config, KVGroup.SLIDING, dtype))
    return f"{whole}, and {within} more for tokens within the window"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def size(number: float) -> str:
    """Bytes in the largest unit that gives a number from 1 up."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
