"""Attention of several chunks in one call, as flash attention takes it: tokens end to end, and their borders.

A chunk whose sequence begins in this pass attends to keys as they come out of the projections; only what was
written in earlier passes is read from the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from headrace.model.attention import visible
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, blocks_for, first_visible_block, keys_of, values_of


@dataclass(frozen=True, slots=True)
class Varlen:
    """All spans of a pass.

    `queries` and `keys` are borders, one more than there are spans: span i's queries are the tokens
    queries[i] .. queries[i + 1] of the pass, and its keys as many as it sees; `on_device` has the same as
    int32 tensors. `past` [n] are the pages with what spans see of earlier passes, or None, and `kept[i]` says
    how many of these are span i's, and how many tokens in them.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    on_device: tuple[Tensor, Tensor]
    window: int | None
    past: Tensor | None
    kept: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys that a span has."""
        return _longest(self.queries), _longest(self.keys)


def plan_varlen(spans: Sequence[Span], group: KVGroup, window: int | None, device: torch.device) -> Varlen:
    """Work out what the spans see; their tables have been checked."""
    kept: list[tuple[int, int]] = []
    past: list[int] = []
    for span in spans:
        first = min(first_visible_block(span.start, window), blocks_for(span.start))
        blocks = span.tables[group][first : blocks_for(span.start)]
        past += blocks
        kept.append((len(blocks), span.start - first * BLOCK_TOKENS if blocks else 0))
    lengths = [len(span.tokens) for span in spans]
    queries = (0, *accumulate(lengths))
    keys = (0, *accumulate(length + tokens for length, (_, tokens) in zip(lengths, kept, strict=True)))
    return Varlen(
        queries,
        keys,
        (
            torch.tensor(queries, dtype=torch.int32, device=device),
            torch.tensor(keys, dtype=torch.int32, device=device),
        ),
        window,
        torch.tensor(past, device=device) if past else None,
        tuple(kept),
    )


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, plan: Varlen) -> Tensor:
    """What q [tokens, heads, dim] takes from k and v [tokens, KV heads, dim] of its pass and from pages."""
    if plan.past is not None:
        seen = pages[plan.past]
        k = _with_past(k, keys_of(seen[:, :, 0]), plan)
        v = _with_past(v, values_of(seen[:, :, 1]), plan)
    return (flash if q.is_cuda else one_by_one)(q, k, v, plan)


def flash(q: Tensor, k: Tensor, v: Tensor, plan: Varlen) -> Tensor:
    """By the flash attention within PyTorch, which skips what no query sees; bfloat16 or float16, on a GPU.

    `torch.nn.attention.varlen` is the public name of this operator, but has no windows in torch 2.10.
    """
    left = -1 if plan.window is None else plan.window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *plan.on_device, *plan.longest, 0.0, True, False),
        window_size_left=left,
        window_size_right=0,
    )[0]
    return out


def one_by_one(q: Tensor, k: Tensor, v: Tensor, plan: Varlen) -> Tensor:
    """The same, span by span: what is meant."""
    parts = []
    for (begin, end), (first, last) in zip(pairwise(plan.queries), pairwise(plan.keys), strict=True):
        positions = torch.arange(last - first, device=q.device)
        mask = visible(positions[begin - end :], positions, plan.window)
        queries, keys, values = (
            x.transpose(0, 1)[None] for x in (q[begin:end], k[first:last], v[first:last])
        )
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _with_past(own: Tensor, past: Tensor, plan: Varlen) -> Tensor:
    """Each span's past, from pages [n, KV heads, BLOCK_TOKENS, dim], and its own tokens after it."""
    past = past.transpose(1, 2)
    parts, page = [], 0
    for (begin, end), (pages, tokens) in zip(pairwise(plan.queries), plan.kept, strict=True):
        parts += [past[page : page + pages].flatten(0, 1)[:tokens], own[begin:end]]
        page += pages
    return torch.cat(parts)


def _longest(borders: Sequence[int]) -> int:
    return max(end - begin for begin, end in pairwise(borders))
