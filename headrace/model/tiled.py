"""Attention of long chunks by cuDNN, which on Hopper GPUs does almost twice what flash attention 2 does.

The way to it through PyTorch has neither windows nor a causal order beside a past, and has a plan made,
which takes long, for every new shape. So queries and keys are cut at multiples of TILE positions, into blocks
of a power of two of them. A block of queries takes parts of three kinds, which are joined by the logarithms
of their sums of exponentials:

- its own tokens: a causal square;
- keys that all its queries see: rectangles, each of a power of two times TILE keys;
- with a window, the keys that leave it one by one: query i sees those after the i-th. Both in reverse order,
  this is a causal square, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.model.attention import visible
from headrace.model.fused import Fused
from headrace.model.hopper import on_hopper

TILE = 1024
LEAST = 2  # tiles of a chunk that are worth the parts
MOST = 16  # tiles of keys that are taken at once, up to some 128: larger parts would only be more shapes


@dataclass(frozen=True, slots=True)
class Part:
    """The first `queries` of a block and some `keys`; `turned` is an index that reverses both."""

    queries: int
    keys: slice
    causal: bool = False
    turned: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that take the same parts: their rows in the pass; keys are rows of what the pass sees."""

    rows: slice
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What cuDNN makes a plan for: see `Attend`."""

    queries: int
    keys: int
    causal: bool
    joined: bool
    count: int = 1


class Attend(Protocol):
    """Attention of q [queries, heads, dim] to k and v [keys, KV heads, dim], causal or to all.

    With a `count`, of so many times as many queries and keys, end to end: the n-th queries see the n-th keys.
    The result has q's shape; if `joined`, with it come the logarithms of the sums of exponentials, float32
    [count, heads, queries].
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, joined: bool, count: int = 1
    ) -> tuple[Tensor, Tensor | None]: ...


def tile_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> int | None:
    """TILE where cuDNN's attention is there and fast: on a Hopper GPU, for the usual head sizes."""
    if dtype == torch.float32 or not on_hopper(device):
        return None
    there = torch.backends.cudnn.version() is not None  # type: ignore[no-untyped-call]
    return TILE if there and head_dim in (64, 128) else None


def whole_tiles(start: int, end: int, window: int | None, tile: int | None) -> tuple[int, int] | None:
    """The positions from start to end that are whole tiles, if these are worth it."""
    if tile is None or (window is not None and window % tile):
        return None
    first, last = -(-start // tile) * tile, end // tile * tile
    return (first, last) if last - first >= LEAST * tile else None


def plan_blocks(
    start: int, end: int, window: int | None, tile: int, *, row: int, key: int, device: torch.device
) -> list[Block]:
    """The blocks of positions start .. end, multiples of `tile`, as is `window`.

    `row` and `key` are the rows of position 0 among queries and keys; they may be negative.
    """
    blocks = []
    while start < end:
        most = end if window is None else min(end, window if start < window else start + window)
        stop, seen, edge = start + largest(start, most, tile), 0, None
        if window is not None and start >= window:  # keys leave it
            seen = stop - window
            edge = _edge(key + start - window, stop - start, device)
        parts = [Part(stop - start, slice(key + start, key + stop), causal=True)]
        parts += [Part(stop - start, slice(key + a, key + b)) for a, b in powers_of_two(seen, start, tile)]
        blocks.append(Block(slice(row + start, row + stop), (*parts, edge) if edge else tuple(parts)))
        start = stop
    return blocks


def _edge(key: int, queries: int, device: torch.device) -> Part:
    """The keys from `key` on that leave the window with the queries: the last query sees none of them."""
    count = queries - 1
    turned = torch.arange(count - 1, -1, -1, device=device)
    return Part(count, slice(key + 1, key + 1 + count), causal=True, turned=turned)


def largest(begin: int, end: int, tile: int) -> int:
    """The largest power of two of tiles that fits between two positions."""
    return tile << ((end - begin) // tile).bit_length() - 1


def powers_of_two(begin: int, end: int, tile: int) -> list[tuple[int, int]]:
    """begin .. end in pieces of a power of two of tiles, the largest first: few shapes for any length.

    There are 14 of them at most up to a thousand tiles, which is what can be joined at once.
    """
    pieces, most = [], longest_piece(end - begin, tile)
    while begin < end:
        size = min(largest(begin, end, tile), most)
        pieces.append((begin, begin + size))
        begin += size
    return pieces


def longest_piece(keys: int, tile: int) -> int:
    """How many of so many keys are taken at once: seven such pieces at most, or MOST tiles each."""
    return max(MOST * tile, largest(0, max(keys, tile), tile) // 4)


def shapes(chunk: int, context: int, window: int | None, tile: int) -> list[Shape]:
    """All that `attend_blocks` can ask for, in passes of up to `chunk` tokens, none behind `context`."""
    whole = min(chunk, context) // tile * tile
    if whole < LEAST * tile or (window is not None and window % tile):
        return []
    queries = _powers(whole if window is None else min(whole, window), tile)
    longest = longest_piece(context - tile, tile) if window is None else window
    keys = _powers(min(longest, context), tile)
    found = [Shape(count, count, causal=True, joined=True) for count in queries]
    alone = [count for count in queries if count >= min(LEAST * tile, queries[-1])]  # at the beginning
    found += [Shape(count, count, causal=True, joined=False) for count in alone]
    found += [
        Shape(count, seen, causal=False, joined=True)
        for count in queries
        for seen in keys
        if window is None or count + seen <= window
    ]
    if window is not None:
        found += [Shape(count - 1, count - 1, causal=True, joined=True) for count in queries]
        found += _pair_shapes(chunk, context, window) if window in queries else []
    return found


def _pair_shapes(chunk: int, context: int, window: int) -> list[Shape]:
    """Of `pairs`: the beginnings of two prompts see nothing else; in one prompt the second window does."""
    if chunk < 2 * window:
        return []
    joined = (False, True) if context >= 2 * window else (False,)
    return [Shape(window, window, causal=True, joined=each, count=2) for each in joined]


def _powers(most: int, tile: int) -> list[int]:
    return [tile << power for power in range((most // tile).bit_length())]


def pairs(blocks: Sequence[Block], window: int | None) -> list[list[Block]]:
    """Blocks in their order: neighbours of a window's length two by two, all others alone.

    Two squares fill a GPU better than one after the other. More at a time would only be more shapes.
    """
    groups: list[list[Block]] = []
    for block in blocks:
        if groups and len(groups[-1]) == 1 and _follows(groups[-1][0], block, window):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _follows(first: Block, second: Block, window: int | None) -> bool:
    both = first.parts[0], second.parts[0]
    return (
        all(part.queries == window for part in both)
        and first.rows.stop == second.rows.start
        and both[0].keys.stop == both[1].keys.start
    )


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    *,
    attend: Attend,
    fused: Fused | None,
    out: Tensor | None = None,
) -> Tensor:
    """What the q of a block, or of a pair, take, [queries, heads, dim]; k and v are all keys of the pass.

    It is put into `out`, if that is given.
    """
    keys = slice(blocks[0].parts[0].keys.start, blocks[-1].parts[0].keys.stop)
    joined, count = any(len(block.parts) > 1 for block in blocks), len(blocks)
    own, sums = attend(q, k[keys], v[keys], causal=True, joined=joined, count=count)
    target, size = own if out is None else out, len(q) // count
    for index, block in enumerate(blocks):
        rows = slice(index * size, (index + 1) * size)
        if sums is not None and len(block.parts) > 1:
            others = [_attend_part(q[rows], k, v, part, attend) for part in block.parts[1:]]
            values, logs = [own[rows]], [sums[index]]
            values += [value for value, _ in others]
            logs += [log for _, log in others]
            turned = [part.turned is not None for part in block.parts]
            # The target may be the first of the values: each number is read before it is written.
            (join if fused is None else fused.join)(values, logs, turned, target[rows])
        elif out is not None:
            out[rows].copy_(own[rows])
    return target


def _attend_part(q: Tensor, k: Tensor, v: Tensor, part: Part, attend: Attend) -> tuple[Tensor, Tensor]:
    queries, keys, seen = q[: part.queries], k[part.keys], v[part.keys]
    if part.turned is not None:
        queries, keys, seen = queries[part.turned], keys[part.turned], seen[part.turned]
    taken, sums = attend(queries, keys, seen, causal=part.causal, joined=True)
    assert sums is not None
    return taken, sums[0]


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, joined: bool, count: int = 1
) -> tuple[Tensor, Tensor | None]:
    """By cuDNN; bfloat16 or float16. A causal order begins with the first query and the first key."""
    queries, keys, values = (_apart(x, count) for x in (q, k, v))
    out, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, joined, 0.0, causal
    )
    sums = log_sums.reshape(count, q.shape[1], -1) if joined else None
    return out.transpose(1, 2).flatten(0, 1).contiguous(), sums


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, joined: bool, count: int = 1
) -> tuple[Tensor, Tensor | None]:
    """The same in so many words: what is meant."""
    repeats = q.shape[1] // k.shape[1]
    queries = _apart(q, count).float()
    keys, values = (_apart(x, count).repeat_interleave(repeats, dim=1).float() for x in (k, v))
    scores = queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        positions = torch.arange(max(scores.shape[-2:]), device=q.device)
        seen = visible(positions[: scores.shape[-2]], positions[: scores.shape[-1]], None)
        scores = scores.masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ values).to(q.dtype).transpose(1, 2).flatten(0, 1)
    return out, scores.logsumexp(-1) if joined else None


def _apart(x: Tensor, count: int) -> Tensor:
    """[count * tokens, heads, dim] as [count, heads, tokens, dim]."""
    return x.reshape(count, -1, *x.shape[1:]).transpose(1, 2)


def join(values: Sequence[Tensor], sums: Sequence[Tensor], turned: Sequence[bool], out: Tensor) -> None:
    """Fill `out`, which may be the first of the values, as `Fused.join` says."""
    logs = torch.full((len(values), len(out), out.shape[1]), -torch.inf, device=out.device)
    for log, part, turn in zip(logs, sums, turned, strict=True):
        log[: part.shape[1]] = part.t().flip(0) if turn else part.t()
    weights = (logs - logs.amax(0)).exp()
    total = torch.zeros(out.shape, device=out.device)
    whole = torch.zeros(out.shape[:2], device=out.device)
    for value, weight, turn in zip(values, weights, turned, strict=True):
        total[: len(value)] += (value.flip(0) if turn else value).float() * weight[: len(value), :, None]
        whole += weight
    out.copy_(total / whole[..., None])
