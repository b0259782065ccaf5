"""Attention of all chunks of a pass together, as on a GPU: tokens laid end to end, and their borders.

A chunk whose sequence begins in this pass attends to keys as they come out of the projections; only what was
written in earlier passes is read from the pages. Whole tiles of a long chunk go to cuDNN (`tiled`), what
sticks out on either side of them and all shorter chunks to flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.model import tiled
from headrace.model.attention import visible
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.fused import Fused
from headrace.model.kv import BLOCK_TOKENS, first_visible_block, keys_of, values_of


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours that attend in one call of flash attention.

    Queries queries[i] .. queries[i + 1] of the pass see the keys keys[i] .. keys[i + 1], of which they are
    the last. `on_device` has both borders as int32 tensors that begin with 0.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    on_device: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Past:
    """The first counts[i] tokens of page blocks[i], from row rows[i] of the keys on: of earlier passes.

    The tensors are int64 [n]. `own` has each span's tokens in the pass and their rows among the keys.
    """

    blocks: Tensor
    rows: Tensor
    counts: Tensor
    own: tuple[tuple[slice, slice], ...]


@dataclass(frozen=True, slots=True)
class Varlen:
    """All spans of a pass: which of their queries attend in what way to the `keys` that it sees in all."""

    keys: int
    window: int | None
    runs: tuple[Run, ...]
    blocks: tuple[tiled.Block, ...] = ()
    past: Past | None = None


def plan_varlen(
    spans: Sequence[Span], group: KVGroup, window: int | None, device: torch.device, tile: int | None = None
) -> Varlen:
    """Work out what the spans see; their tables have been checked."""
    made = _Plan(group, window, device, tile)
    for span in spans:
        made.add(span)
    return made.whole()


class _Plan:
    """The spans so far: how many tokens and keys they have, and how these attend."""

    def __init__(self, group: KVGroup, window: int | None, device: torch.device, tile: int | None) -> None:
        self.group, self.window, self.device, self.tile = group, window, device, tile
        self.row = self.key = 0
        self.past: list[np.ndarray[Any, Any]] = []  # of each span: the columns of `Past`, as rows
        self.own: list[tuple[slice, slice]] = []
        self.runs: list[tuple[list[int], list[int]]] = []
        self.blocks: list[tiled.Block] = []
        self.adjoins = False  # whether the last run may be continued

    def add(self, span: Span) -> None:
        first = first_visible_block(span.start, self.window) * BLOCK_TOKENS
        row, key = self.row - span.start, self.key - first  # from positions to rows
        begins = np.arange(first, span.start, BLOCK_TOKENS)
        pages = span.tables[self.group][first // BLOCK_TOKENS :][: len(begins)]
        counts = np.minimum(BLOCK_TOKENS, span.start - begins)
        self.past.append(np.stack([np.array(pages, dtype=np.int64), key + begins, counts]))
        own = slice(row + span.start, row + span.end), slice(key + span.start, key + span.end)
        self.own.append(own)
        tiles = tiled.whole_tiles(span.start, span.end, self.window, self.tile)
        if tiles is None:
            self._run(row + span.start, row + span.end, key + span.end)
        else:
            start, end = tiles
            self._run(row + span.start, row + start, key + start)
            self.adjoins = False
            self.blocks += tiled.plan_blocks(
                start, end, self.window, self.tile or 0, row=row, key=key, device=self.device
            )
            self._run(row + end, row + span.end, key + span.end)
        self.adjoins = tiles is None
        self.row, self.key = row + span.end, key + span.end

    def _run(self, begin: int, end: int, keys: int) -> None:
        """Queries begin .. end see the span's keys up to row `keys`."""
        if begin == end:
            return
        if not self.adjoins:
            self.runs.append(([begin], [self.key]))
        self.runs[-1][0].append(end)
        self.runs[-1][1].append(keys)
        self.adjoins = False

    def whole(self) -> Varlen:
        past = np.concatenate(self.past, axis=1)
        blocks, rows, counts = torch.from_numpy(past).to(self.device)  # one copy: each is a wait
        return Varlen(
            self.key,
            self.window,
            tuple(run_of(queries, keys, self.device) for queries, keys in self.runs),
            tuple(self.blocks),
            Past(blocks, rows, counts, tuple(self.own)) if past.size else None,
        )


def run_of(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Run:
    """A run with the borders `queries` and `keys`."""
    borders = torch.tensor([queries, keys], dtype=torch.int32)
    from_queries, from_keys = (borders - borders[:, :1]).to(device)
    return Run(tuple(queries), tuple(keys), (from_queries, from_keys))


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, plan: Varlen, fused: Fused | None = None
) -> Tensor:
    """What q [tokens, heads, dim] takes from k and v [tokens, KV heads, dim] of its pass and from pages."""
    if plan.past is not None:
        k, v = with_past(k, v, pages, plan.keys, plan.past, fused)
    simple = flash if q.is_cuda else one_by_one
    if not plan.blocks and len(plan.runs) == 1:
        return simple(q, k, v, plan.runs[0], plan.window)
    attend = tiled.cudnn if q.is_cuda else tiled.plain
    groups = tiled.pairs(plan.blocks, plan.window)
    if not plan.runs and len(groups) == 1:
        return tiled.attend_blocks(q, k, v, groups[0], attend=attend, fused=fused)
    out = torch.empty_like(q)
    for run in plan.runs:
        rows, keys = slice(run.queries[0], run.queries[-1]), slice(run.keys[0], run.keys[-1])
        out[rows] = simple(q[rows], k[keys], v[keys], run, plan.window)
    for group in groups:
        rows = slice(group[0].rows.start, group[-1].rows.stop)
        tiled.attend_blocks(q[rows], k, v, group, attend=attend, fused=fused, out=out[rows])
    return out


def flash(q: Tensor, k: Tensor, v: Tensor, run: Run, window: int | None) -> Tensor:
    """By the flash attention within PyTorch, which skips what no query sees; bfloat16 or float16, on a GPU.

    `torch.nn.attention.varlen` is the public name of this operator, but has no windows in torch 2.10.
    """
    left = -1 if window is None else window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *run.on_device, _longest(run.queries), _longest(run.keys), 0.0, True, False),
        window_size_left=left,
        window_size_right=0,
    )[0]
    return out


def one_by_one(q: Tensor, k: Tensor, v: Tensor, run: Run, window: int | None) -> Tensor:
    """The same, span by span: what is meant."""
    parts = []
    for (begin, end), (first, last) in zip(pairwise(run.queries), pairwise(run.keys), strict=True):
        rows, seen = (
            slice(begin - run.queries[0], end - run.queries[0]),
            slice(first - run.keys[0], last - run.keys[0]),
        )
        positions = torch.arange(last - first, device=q.device)
        mask = visible(positions[begin - end :], positions, window)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], k[seen], v[seen]))
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def with_past(
    k: Tensor, v: Tensor, pages: Tensor, keys: int, past: Past, fused: Fused | None
) -> tuple[Tensor, Tensor]:
    """K and V [keys, KV heads, dim]: each span's past, from pages, and its own tokens after it."""
    all_k, all_v = (x.new_empty(keys, *x.shape[1:]) for x in (k, v))
    (read_blocks if fused is None else fused.read_blocks)(
        pages, past.blocks, past.rows, past.counts, all_k, all_v
    )
    for tokens, rows in past.own:
        all_k[rows], all_v[rows] = k[tokens], v[tokens]
    return all_k, all_v


def read_blocks(pages: Tensor, blocks: Tensor, rows: Tensor, counts: Tensor, k: Tensor, v: Tensor) -> None:
    """As `Fused.read_blocks` says."""
    seen = pages[blocks]
    offsets = torch.arange(BLOCK_TOKENS, device=rows.device)
    there = offsets < counts[:, None]
    where = (rows[:, None] + offsets)[there]
    k[where] = keys_of(seen[:, :, 0]).transpose(1, 2)[there]
    v[where] = values_of(seen[:, :, 1]).transpose(1, 2)[there]


def _longest(borders: Sequence[int]) -> int:
    return max(end - begin for begin, end in pairwise(borders))
