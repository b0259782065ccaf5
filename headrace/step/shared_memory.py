"""What a step takes of an SM's shared memory: the kernel's `Shared` (state.h), member by member."""

from __future__ import annotations

from headrace.step.buffers import CANDIDATE
from headrace.step.isa import DIGIT_BINS, MAX_CHUNKS, PAGE_BYTES_MAX, TILE_ROWS, WORDS
from headrace.step.machine import MERGED_TILES, SHARED_BYTES, TASK_SLOTS, WARP, Machine
from headrace.step.sizes import Sizes

MOST_PAGES = 12  # of a ring: the most that was measured
_CONSUMER_WARPS, _MESSAGES, _ORDERS = 8, 16, 16
_TABLES = 1024  # counts, flags, notes, a recorded launch's lines, and what alignment leaves empty


def shared_bytes(machine: Machine, sizes: Sizes, residual_tiles: int) -> int:
    """Shared memory of an SM that owns so many tiles of the residual; never less than the kernel's."""
    return machine.ring_pages * (PAGE_BYTES_MAX + 16) + _beside_ring(sizes, residual_tiles)


def machine_for(sizes: Sizes, residual_tiles: int) -> Machine:
    """A ring of as many pages as there is room for, MOST_PAGES at most."""
    room = SHARED_BYTES - _beside_ring(sizes, residual_tiles)
    return Machine(ring_pages=max(1, min(MOST_PAGES, room // (PAGE_BYTES_MAX + 16))))


def _beside_ring(sizes: Sizes, residual_tiles: int) -> int:
    rows = sizes.rows
    payload = _MESSAGES * rows * TILE_ROWS * 2
    sums = 2 * _CONSUMER_WARPS * (4 if rows > 8 else 2) * TILE_ROWS * min(max(rows, 2), 8) * 4
    weights = 2 * 2 * WARP * 16  # of two groups of warps, for both halves of a block
    inputs = 12288 if rows == 1 else 16384 if rows <= 4 else 16
    residual = residual_tiles * rows * TILE_ROWS * 4
    tasks = TASK_SLOTS * (WORDS + 4) * 4 + _MESSAGES * 32 + _ORDERS * 16
    barriers = 2 * (TASK_SLOTS + _MESSAGES) * 8
    lookups = sizes.layers * 8 + sizes.head_dim * 2 + MAX_CHUNKS * 8
    of_rows = rows * (8 + 28 + 4 + 2 * 20 + 4)  # scales, state, new blocks, chunks, next tokens
    of_rounds = max(rows * 64, 512)  # the rows' spreads, or attention's largest scores and sums
    members = (
        payload,
        _record(sizes),
        max(sums, weights),
        inputs,
        residual,
        tasks,
        barriers,
        lookups,
        of_rows,
        of_rounds,
    )
    return sum(members) + max(_route(sizes), rows * 84) + _TABLES


def _record(sizes: Sizes) -> int:
    """The largest of what lies there in turn: parts of attention, router logits, candidates, a histogram."""
    chunks = MAX_CHUNKS if sizes.head_dim >= 64 else 16
    logits = max(sizes.router_tiles, 1) * TILE_ROWS * sizes.rows * 4
    return max(chunks * MERGED_TILES * TILE_ROWS * 4, logits, sizes.rows * CANDIDATE.itemsize, DIGIT_BINS * 8)


def _route(sizes: Sizes) -> int:
    """Active experts with their users and weights, the rows' choices, and where every expert is listed."""
    active = min(sizes.experts, sizes.rows * sizes.top_k)
    return active * (8 + 4 * sizes.rows) + sizes.rows * sizes.top_k * 2 + sizes.experts * 2
