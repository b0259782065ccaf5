"""Attention of ragged spans over the paged cache.

All that depends on the spans alone (which page a token goes to, which pages it sees, masks) is worked
out once a pass for each KV group, on the host, and every layer of the group uses it. Single tokens attend in
batches, padded to the longest of the batch; chunks one by one, or on a GPU all together (`varlen`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headrace.model.attention import visible
from headrace.model.batch import Span
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import BLOCK_TOKENS, NO_BLOCK, KVCache, first_visible_block, keys_of, values_of
from headrace.model.rope import Rotation
from headrace.model.tiled import tile_for
from headrace.model.varlen import Varlen, attend_varlen, plan_varlen
from headrace.model.writes import Writes, plan_writes

# The most blocks that one batch of single tokens gathers, padding included, unless one token alone sees more.
# At North's sizes it is 1 GB of K and V in bf16: enough to fill a GPU, little beside its memory.
GATHER_BLOCKS = 8192


@dataclass(frozen=True, slots=True)
class Singles:
    """Spans of one token that attend together.

    `rows` [n] are their places in the pass, `blocks` [n, m] the pages they see, padded with the last one, and
    `mask` [n, 1, 1, m * BLOCK_TOKENS] says which of the keys in these they see.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span of several tokens.

    `rows` is where it lies in the pass; `keys` counts the keys in `blocks` up to its own last token, and
    `mask` [tokens, keys] is None where every token sees all keys up to its own.
    """

    rows: slice
    blocks: Tensor
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Where the tokens of a pass are written in a KV group, and what they read: `varlen`, or the other two.

    `begun` are the blocks that they begin and do not fill. The rest of these is masked, but 0 times
    what is no number is none either, and a request that failed may have left that: so they are cleared first.
    """

    begun: Tensor
    writes: Writes
    singles: tuple[Singles, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    varlen: Varlen | None = None


class PagedSpans:
    """A pass over spans of sequences whose K and V live in a cache."""

    def __init__(
        self, config: ModelConfig, spans: Sequence[Span], cache: KVCache, rotation: Rotation
    ) -> None:
        self.rotation = rotation
        self.cache = cache
        self.groups = [layer.group for layer in config.layers]
        windows = {layer.group: layer.window for layer in config.layers}
        device = rotation.cos.device
        dtype = cache.pages[0].dtype
        flash, tile = has_flash(device, dtype), tile_for(device, dtype, config.head_dim)
        self.plans = {
            group: plan_group(spans, group, windows[group], device, flash, tile) for group in windows
        }

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(layer, k, v)
        plan, pages = self.plans[self.groups[layer]], self.cache.pages[layer]
        if plan.varlen is not None:
            return attend_varlen(q, k, v, pages, plan.varlen, self.cache.fused)
        out = torch.empty_like(q)
        for singles in plan.singles:
            out[singles.rows] = attend_singles(q[singles.rows], pages, singles)
        for chunk in plan.chunks:
            out[chunk.rows] = attend_chunk(q[chunk.rows], pages, chunk)
        return out

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        plan = self.plans[self.groups[layer]]
        if len(plan.begun):
            self.cache.pages[layer][plan.begun] = 0
        plan.writes.write(self.cache, layer, k, v)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has flash attention for pages of this kind."""
    return (
        device.type == "cuda"
        and dtype != torch.float32
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def plan_group(
    spans: Sequence[Span],
    group: KVGroup,
    window: int | None,
    device: torch.device,
    flash: bool,
    tile: int | None = None,
) -> GroupPlan:
    """Work out reads and writes of one group. Raises ValueError if a table misses a visible block."""
    tables = []  # of each span: the first block that it sees, and the ids from there on
    for span in spans:
        first = first_visible_block(span.start, window)
        tables.append((first, visible_blocks(span, group, first)))
    begun = torch.tensor(
        [blocks[-1] for span, (_, blocks) in zip(spans, tables, strict=True) if begins(span)],
        dtype=torch.int64,
        device=device,
    )
    writes = plan_writes(
        [(span.start, span.end, *table) for span, table in zip(spans, tables, strict=True)]
    ).to(device)
    if flash and any(len(span.tokens) > 1 for span in spans):
        return GroupPlan(begun, writes, varlen=plan_varlen(spans, group, window, device, tile))
    singles: list[tuple[int, Span, list[int]]] = []
    chunks: list[Chunk] = []
    row = 0
    for span, (first, blocks) in zip(spans, tables, strict=True):
        if len(span.tokens) == 1:
            singles.append((row, span, blocks))
        else:
            rows = slice(row, row + len(span.tokens))
            table = torch.tensor(blocks, device=device)
            chunks.append(plan_chunk(rows, span, table, first * BLOCK_TOKENS, window))
        row += len(span.tokens)
    return GroupPlan(
        begun,
        writes,
        tuple(plan_singles(batch, window, device) for batch in batches(singles)),
        tuple(chunks),
    )


def begins(span: Span) -> bool:
    """Whether the span writes the first token of the block that it ends in, and does not fill it."""
    return span.end % BLOCK_TOKENS > 0 and span.start <= (span.end - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def visible_blocks(span: Span, group: KVGroup, first: int) -> list[int]:
    """The block ids from the first that the span sees to the one of its last token."""
    needed = (span.end - 1) // BLOCK_TOKENS + 1
    blocks = list(span.tables[group][first:needed])
    if len(blocks) < needed - first or NO_BLOCK in blocks:
        raise ValueError(
            f"positions {first * BLOCK_TOKENS}..{span.end - 1} of the {group} layers need blocks "
            f"{first}..{needed - 1}, but the table gives {blocks}: it is too short, or a block was given back"
        )
    return blocks


def batches(
    singles: list[tuple[int, Span, list[int]]],
) -> list[list[tuple[int, Span, list[int]]]]:
    """Sort single tokens by how much they see, and split them so that no padded gather becomes too large."""
    split: list[list[tuple[int, Span, list[int]]]] = []
    for single in sorted(singles, key=lambda single: len(single[2])):
        if not split or len(single[2]) * (len(split[-1]) + 1) > GATHER_BLOCKS:
            split.append([])
        split[-1].append(single)
    return split


def plan_singles(
    batch: list[tuple[int, Span, list[int]]], window: int | None, device: torch.device
) -> Singles:
    """The padded table and the mask of one batch of single tokens."""
    longest = max(len(blocks) for _, _, blocks in batch)
    padded = torch.tensor([blocks + blocks[-1:] * (longest - len(blocks)) for _, _, blocks in batch])
    queries = torch.tensor([span.start for _, span, _ in batch])
    first = torch.tensor([first_visible_block(span.start, window) * BLOCK_TOKENS for _, span, _ in batch])
    # Padding stands for positions after the token's own, so the causal mask hides it.
    keys = first[:, None] + torch.arange(longest * BLOCK_TOKENS)
    mask = visible(queries[:, None], keys, window)
    rows = torch.tensor([row for row, _, _ in batch])
    return Singles(rows.to(device), padded.to(device), mask[:, None].to(device))


def plan_chunk(rows: slice, span: Span, blocks: Tensor, first_key: int, window: int | None) -> Chunk:
    """The pages of a chunk and, where a window or a past asks for one, its mask."""
    mask = None
    if span.start > 0 or (window is not None and span.end > window):
        queries = torch.arange(span.start, span.end, device=blocks.device)
        mask = visible(queries, torch.arange(first_key, span.end, device=blocks.device), window)
    return Chunk(rows, blocks, span.end - first_key, mask)


def gather(pages: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of `blocks` [..., n] as [..., KV heads, n * BLOCK_TOKENS, dim], copied and put in order."""
    heads = torch.arange(pages.shape[1], device=pages.device)[:, None]
    where = (blocks[..., None, :], heads)
    return keys_of(pages[*where, 0]).flatten(-3, -2), values_of(pages[*where, 1]).flatten(-3, -2)


def attend_singles(q: Tensor, pages: Tensor, singles: Singles) -> Tensor:
    """q and the result are [n, heads, dim].

    The query heads that share a KV head take the place of a sequence's queries, so K and V are not repeated.
    """
    k, v = gather(pages, singles.blocks)
    grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])
    return functional.scaled_dot_product_attention(grouped, k, v, attn_mask=singles.mask).flatten(1, 2)


def attend_chunk(q: Tensor, pages: Tensor, chunk: Chunk) -> Tensor:
    """q and the result are [tokens, heads, dim]."""
    k, v = (x[None, :, : chunk.keys] for x in gather(pages, chunk.blocks))
    heads = q.shape[1]
    q = q.transpose(0, 1)[None]
    if chunk.mask is None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        # Repeated KV heads rather than enable_gqa: with a mask the latter has no fused kernel.
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=chunk.mask)
    return out[0].transpose(0, 1)
