"""Host side of `passes.cu`: each step of a prompt's layer as a function of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernel.build import build_source, has_compiler
from headrace.kernel.device import Module
from headrace.model.config import ModelConfig, MoEMLP
from headrace.model.hopper import on_hopper
from headrace.model.rope import Rotation

SOURCE = Path(__file__).with_name("passes.cu")
KERNELS = (
    *("swiglu", "add", "combine", "rotate", "write_blocks", "read_blocks", "join"),
    *("choose", "count_slots", "place_slots", "spread", "unpack"),
)
THREADS = 256
_EIGHT = 16  # bytes
_SLOTS = 256  # that a block of `count_slots` and `place_slots` takes
_MOST_PARTS = 16  # that `join` takes at once


def fits(config: ModelConfig) -> bool:
    """Whether the kernels take a model's sizes: they move eight numbers, and pages 32 columns, at a time."""
    widths = [config.hidden_size, *(layer.mlp.width for layer in config.layers)]
    routed = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoEMLP)]
    return (
        all(mlp.experts % 4 == 0 and mlp.experts <= 1024 for mlp in routed)
        and all(width % 8 == 0 for width in widths)
        and config.hidden_size <= 8 * 1024  # a thread each, of one block
        and config.head_dim % 32 == 0
        and config.head_dim <= 256
    )


def available(device: torch.device) -> bool:
    """Whether they run there: on a Hopper GPU, with cuda.core and NVRTC installed."""
    return on_hopper(device) and has_compiler()


class Passes:
    """`headrace.model.fused.Fused` on the current GPU. All tensors are contiguous.

    `unpack` runs in `unpack_blocks` blocks of `unpack_threads`: in many that end soon, if it is None.
    """

    unpack_blocks: int | None = None
    unpack_threads = THREADS

    def __init__(self) -> None:
        self._module = Module(build_source(SOURCE.read_text(), {}).cubin)
        self._kernels = {name: self._module.kernel(name) for name in KERNELS}

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [rows, width], of gate and up side by side, [rows, 2 * width]."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        count = out.numel() // 8
        self._launch("swiglu", (_blocks(count), 1), THREADS, gate_up, out, count, width // 8)
        return out

    def add(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """x + y + z, each sum rounded; all of one shape."""
        if not x.shape == y.shape == z.shape or x.numel() % 8:
            raise ValueError(f"{tuple(x.shape)}, {tuple(y.shape)} and {tuple(z.shape)} cannot be added")
        out = torch.empty_like(x)
        count = out.numel() // 8
        self._launch("add", (_blocks(count), 1), THREADS, x, y, z, out, count)
        return out

    def combine(self, parts: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Sums [tokens, hidden] over rows `places` of parts times `weights`, both [tokens, top_k]."""
        tokens, top_k = places.shape
        out = parts.new_empty(tokens, parts.shape[1])
        self._launch("combine", (tokens, 1), parts.shape[1] // 8, parts, places, weights, out, top_k)
        return out

    def rotate(self, x: Tensor, by: Rotation) -> Tensor:
        """x [tokens, heads, head_dim] with each pair of neighbours turned."""
        out = torch.empty_like(x)
        count = out.numel() // 8
        sizes = (count, x.shape[1], x.shape[2] // 8)
        self._launch("rotate", (_blocks(count), 1), THREADS, x, out, by.cos, by.sin, *sizes)
        return out

    def write_blocks(self, pages: Tensor, blocks: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill the pages of `blocks` [n] with k and v, [n * BLOCK_TOKENS, KV heads, head_dim]."""
        eighths = k.shape[2] // 8
        shared = 64 * (eighths + 1) * _EIGHT
        self._launch(
            "write_blocks", (len(blocks), k.shape[1]), THREADS, k, v, pages, blocks, eighths, shared=shared
        )

    def read_blocks(
        self, pages: Tensor, blocks: Tensor, rows: Tensor, counts: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Copy the first counts[i] tokens of page blocks[i] to rows[i] and on of k and v, for every i."""
        eighths = k.shape[2] // 8
        shared, grid = 64 * (eighths + 1) * _EIGHT, (len(blocks), k.shape[1])
        self._launch("read_blocks", grid, THREADS, pages, blocks, rows, counts, k, v, eighths, shared=shared)

    def join(
        self, values: Sequence[Tensor], sums: Sequence[Tensor], turned: Sequence[bool], out: Tensor
    ) -> None:
        """Fill out with the mean of parts of an attention, weighed by their sums of exponentials."""
        if len(values) > _MOST_PARTS:
            raise ValueError(f"{len(values)} parts are more than {_MOST_PARTS}")
        rows = [-len(part) if turn else len(part) for part, turn in zip(values, turned, strict=True)]
        parts = Parts(*(_filled(column) for column in (values, sums, rows)))
        queries, heads, eighths = len(out), out.shape[1], out.shape[2] // 8
        self._launch("join", (queries, 1), THREADS, parts, out, heads, eighths, len(values))

    def choose(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The experts with the largest logits [tokens, experts], ascending, and the sigmoids of these."""
        tokens, experts = logits.shape
        ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
        weights = logits.new_empty(tokens, top_k)
        shared = 4 * (experts + top_k)
        self._launch("choose", (tokens, 1), experts, logits, ids, weights, experts, top_k, shared=shared)
        return ids, weights

    def group(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Slots [tokens, top_k] sorted by expert: the place of each, and the one after each expert's last."""
        slots = ids.numel()
        grid, shared = (-(-slots // _SLOTS), 1), 4 * _SLOTS
        counts = torch.empty(experts, grid[0], dtype=torch.int32, device=ids.device)
        self._launch("count_slots", grid, experts, ids, counts, slots, experts, shared=shared)
        ends = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts)
        places = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
        self._launch("place_slots", grid, experts, ids, counts, ends, places, slots, experts, shared=shared)
        return places, ends[:, -1].contiguous()

    def spread(self, x: Tensor, places: Tensor) -> Tensor:
        """Rows [tokens * top_k, hidden], of which those at places [tokens, top_k] are x [tokens, hidden]."""
        tokens, top_k = places.shape
        rows = x.new_empty(places.numel(), x.shape[1])
        self._launch("spread", (tokens, 1), x.shape[1] // 8, x, places, rows, top_k)
        return rows

    def unpack(self, stored: Tensor, out: Tensor, *, paired: bool) -> None:
        """Copy packed matrices, one-dimensional, to out [matrices, rows, columns]: tiles of 8 rows by 32."""
        _, rows, columns = out.shape
        count = out.numel() // 64
        if rows % 8 or columns % 32 or count >= 2**31 or stored.numel() != out.numel():
            raise ValueError(f"{stored.numel()} numbers cannot be unpacked to {tuple(out.shape)}")
        threads = self.unpack_threads
        grid = (self.unpack_blocks or -(-count // threads), 1)
        self._launch("unpack", grid, threads, stored, out, count, columns, rows, int(paired))

    def _launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        *arguments: Tensor | int | Parts,
        shared: int = 0,
    ) -> None:
        stream = torch.cuda.current_stream()
        passed = [_passed(argument) for argument in arguments]
        self._module.launch(self._kernels[name], stream, *passed, grid=grid, threads=threads, shared=shared)


class Parts(NamedTuple):
    """The struct of the same name: addresses of values and sums, and numbers of rows."""

    values: np.ndarray[Any, Any]
    sums: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]


def _filled(column: Sequence[Tensor] | Sequence[int]) -> np.ndarray[Any, Any]:
    words = [_address(entry) if isinstance(entry, Tensor) else entry for entry in column]
    return np.array(words + [0] * (_MOST_PARTS - len(words)), dtype=np.int64)


def _passed(argument: Tensor | int | Parts) -> int | np.ndarray[Any, Any]:
    """An argument as `Module.launch` takes it."""
    if isinstance(argument, Parts):
        return np.concatenate(argument)
    return _address(argument) if isinstance(argument, Tensor) else argument


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the kernels take contiguous tensors")
    return tensor.data_ptr()


def _blocks(count: int) -> int:
    return -(-count // THREADS)
