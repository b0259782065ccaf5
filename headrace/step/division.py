"""How work that depends on a step's data is divided: the same integer rules on host and device.

Every rule is a function of the live rows alone, so that all SMs find the same division without a word
between them. A row's chunks depend on its own position alone, so that its sums do not change with company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.model.kv import BLOCK_TOKENS, first_visible_block
from headrace.step.isa import CHUNK_BLOCKS, MAX_CHUNKS


def share_of(total: int, share: int, shares: int) -> range:
    """Which of `total` items belong to a share: all shares together have each item once."""
    return range(total * share // shares, total * (share + 1) // shares)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one row's attention: `count` of them, of `size` KV blocks, from block `first` to `last`.

    Chunk c covers blocks first + c * size on; the last one may be shorter.
    """

    first: int
    last: int
    size: int
    count: int

    def blocks(self, chunk: int) -> range:
        begin = self.first + chunk * self.size
        return range(begin, min(begin + self.size, self.last + 1))


def chunks_of(position: int, window: int) -> Chunks:
    """The chunks of a row at `position`; window 0 sees everything.

    A chunk is CHUNK_BLOCKS blocks, or as many as it takes for the row to have at most MAX_CHUNKS chunks.
    """
    first, last = first_visible_block(position, window or None), position // BLOCK_TOKENS
    visible = last - first + 1
    size = max(CHUNK_BLOCKS, -(-visible // MAX_CHUNKS))
    return Chunks(first, last, size, -(-visible // size))


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """One chunk of one row and KV head."""

    row: int
    kv_head: int
    chunk: int


def attention_items(
    positions: Sequence[int | None], kv_heads: int, window: int, share: int, shares: int
) -> list[AttentionItem]:
    """The items of one share, in order, for rows at `positions` (None: inactive).

    All items in the order (row, KV head, chunk) are laid on a line, each as long as its row's chunk size. The
    line is cut into equal shares; an item belongs to the share in which it begins.
    """
    rows = [(row, chunks_of(at, window)) for row, at in enumerate(positions) if at is not None]
    total = sum(kv_heads * chunks.count * chunks.size for _, chunks in rows)
    mine = share_of(total, share, shares)
    items: list[AttentionItem] = []
    begin = 0
    for row, chunks in rows:
        length = chunks.count * chunks.size
        for kv_head in range(kv_heads):
            low = max(0, -(-(mine.start - begin) // chunks.size))
            high = min(chunks.count, -(-(mine.stop - begin) // chunks.size))
            items += [AttentionItem(row, kv_head, chunk) for chunk in range(low, high)]
            begin += length
    return items


def active_experts(chosen: Sequence[Sequence[int]]) -> list[int]:
    """The experts that any row was routed to, in index order; the place in the list is the slot in HIDDEN."""
    return sorted({expert for row in chosen for expert in row})
