"""QKV_PROJ: queries, keys and values of one KV head's group, turned by position, published and stored."""

from __future__ import annotations

import numpy as np

from headrace.step.isa import TILE_ROWS, Buffer, Field, Pairing
from headrace.step.oracle.arithmetic import Floats, dot, turned
from headrace.step.oracle.core import Task


def qkv_proj(task: Task) -> None:
    states = task.states()
    rows, sizes = list(states), task.sizes
    results = dot(task.normalized(rows), task.weight_rows()).reshape(len(rows), -1, TILE_ROWS)
    positions = np.array([state.position for state in states.values()], dtype=np.int64)
    # Tiles of the buffer, and what goes there.
    places: list[int] = []
    values: list[Floats] = []
    tile = task.tiles.start
    while tile < task.tiles.stop:
        within = tile - task[Field.KV_HEAD] * sizes.qkv_tiles
        is_value = within >= (sizes.group + 1) * sizes.head_tiles
        split = task[Field.ROPE] == Pairing.HALF_SPLIT and not is_value
        width = 2 if split else 1
        stored = results[:, tile - task.tiles.start : tile - task.tiles.start + width].reshape(len(rows), -1, 2)
        head_tile = within % sizes.head_tiles
        if task[Field.ROPE] != Pairing.NONE and not is_value:
            pair = head_tile * TILE_ROWS // 2
            stored = turned(stored, positions, task.machine.frequencies[pair : pair + stored.shape[1]])
        if split:
            first = tile - head_tile + head_tile // 2
            places += [first, first + sizes.head_tiles // 2]
            values += [stored[..., 0], stored[..., 1]]
        else:
            places.append(tile)
            values.append(stored.reshape(len(rows), TILE_ROWS))
        tile += width
    task.write_rows(Buffer.QKV, np.array(places), rows, np.concatenate(values, axis=1))
    _store(task, places, values)


def _store(task: Task, places: list[int], values: list[Floats]) -> None:
    """Keys and values into the pages of their tokens, for later steps."""
    head_tiles = task.sizes.head_tiles
    first = task[Field.KV_HEAD] * task.sizes.qkv_tiles + task.sizes.group * head_tiles
    states = list(task.states().values())
    for place, value in zip(places, values, strict=True):
        part, tile = divmod(place - first, head_tiles)
        if part < 0:  # a query
            continue
        elements = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        for state, row in zip(states, task.machine.rounding.apply(value), strict=True):
            task.store_token(state, part, elements, row)
