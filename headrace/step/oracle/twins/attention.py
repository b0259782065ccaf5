"""ATTENTION: partial results of softmax attention over chunks of the past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.model.kv import BLOCK_TOKENS
from headrace.step.division import AttentionItem, attention_items, chunks_of
from headrace.step.isa import Buffer, Field
from headrace.step.oracle.arithmetic import Floats, dot, exp, fold
from headrace.step.oracle.clocks import Target
from headrace.step.oracle.core import Task


@dataclass(frozen=True, slots=True)
class Fetched:
    """An item with its blocks' pages, keys and values [BLOCK_TOKENS, head_dim] each."""

    item: AttentionItem
    blocks: range
    pages: list[tuple[Floats, Floats]]


def visible(position: int, window: int) -> range:
    """The positions that a row at `position` sees."""
    return range(max(0, position - window + 1) if window else 0, position + 1)


def fetch(task: Task) -> list[Fetched]:
    """The loader's part: which items there are, and their pages as they are in memory now."""
    states, window = task.all_states(), task[Field.WINDOW]
    items = attention_items(
        states.positions(), task.sizes.kv_heads, window, task[Field.SHARE], task[Field.SHARES]
    )
    active = states.active()
    fetched = []
    for item in items:
        state = active[item.row]
        table = state.row.tables[task.group]
        blocks = chunks_of(state.position, window).blocks(item.chunk)
        old = range(visible(state.position, window).start, states.first_new(state.row.slot))
        pages = []
        for block in blocks:
            begin = block * BLOCK_TOKENS
            used = slice(max(old.start - begin, 0), max(min(old.stop - begin, BLOCK_TOKENS), 0))
            pages.append(task.fetch_pages(table[block], item.kv_head, used))
        fetched.append(Fetched(item, blocks, pages))
    return fetched


def waits(task: Task, fetched: list[Fetched]) -> list[Target]:
    """The counters of those KV heads that the items are of."""
    heads = sorted({one.item.kv_head for one in fetched})
    if not task[Field.WAIT_COUNTER]:
        return []
    value = task.epoch * task[Field.WAIT_ARRIVALS]
    return [Target(task[Field.WAIT_COUNTER] + head, value) for head in heads]


def attention(task: Task, fetched: list[Fetched]) -> None:
    for one in fetched:
        task.write(
            Buffer.PARTIALS,
            (one.item.row, one.item.kv_head, one.item.chunk),
            attend(task, one),
        )


def attend(task: Task, one: Fetched) -> Floats:
    """One record of PARTIALS: outputs [G, head_dim], maxima [G] and sums [G], padded."""
    sizes, states = task.sizes, task.all_states()
    state = states.active()[one.item.row]
    head, group, dim = one.item.kv_head, sizes.group, sizes.head_dim
    new = states.writers(state.row.slot, upto=state.position)
    qkv = task.read_rows(
        Buffer.QKV, slice(head * sizes.qkv_tiles, (head + 1) * sizes.qkv_tiles), list(range(sizes.rows))
    ).reshape(sizes.rows, group + 2, dim)
    queries = qkv[one.item.row, :group]
    seen = visible(state.position, task[Field.WINDOW])
    maxima = np.full(group, -np.inf, dtype=np.float32)
    sums = np.zeros(group, dtype=np.float32)
    outputs = np.zeros((group, dim), dtype=np.float32)
    for block, (keys, values) in zip(one.blocks, one.pages, strict=True):
        begin = block * BLOCK_TOKENS
        low, high = max(seen.start - begin, 0), min(seen.stop - begin, BLOCK_TOKENS)
        for position, row in new.items():
            if begin <= position < begin + BLOCK_TOKENS:
                keys[position - begin], values[position - begin] = qkv[row, group], qkv[row, group + 1]
        # Masked tokens may hold anything: what nobody wrote, or what another sequence left.
        hidden = np.ones(BLOCK_TOKENS, dtype=np.bool_)
        hidden[low:high] = False
        keys[hidden], values[hidden] = 0, 0
        scores = dot(queries, keys) / np.sqrt(np.float32(dim))
        scores[:, hidden] = -np.inf
        grown = np.maximum(maxima, scores.max(axis=1))
        scale, weights = exp(maxima - grown), exp(scores - grown[:, None])
        sums = sums * scale + fold(weights)
        products = task.machine.rounding.apply(weights)[:, None, :] * values.T
        outputs = outputs * scale[:, None] + fold(products)
        maxima = grown
    record = np.zeros(sizes.partial_floats, dtype=np.float32)
    whole = np.concatenate([outputs.reshape(-1), maxima, sums])
    record[: len(whole)] = whole
    return record
