"""QKV_PROJ: queries, keys and values of one KV head's group, turned by position, published and stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.step.isa import TILE_ROWS, Buffer, Field, Pairing
from headrace.step.oracle.arithmetic import Floats, dot, turned
from headrace.step.oracle.core import Task, Tiles


def qkv_proj(task: Task) -> None:
    states = task.states()
    rows = list(states)
    results = dot(task.normalized(rows), task.weight_rows())
    where = destinations(task)
    if task[Field.ROPE] != Pairing.NONE:
        positions = np.array([state.position for state in states.values()], dtype=np.int64)
        pairs = results.reshape(len(rows), -1, 2)
        results = turned(pairs, positions, frequencies(task, where)).reshape(len(rows), -1)
    results = results[:, where.order]
    task.write_rows(Buffer.QKV, where.tiles, rows, results)
    _store(task, where.tiles, task.machine.rounding.apply(results))


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where the stored rows of a task go.

    `elements` of QKV, by stored row; `order` sorts stored rows by them; `tiles` are those that they fill.
    """

    elements: Tiles
    order: Tiles
    tiles: Tiles


def destinations(task: Task) -> Destinations:
    stored = np.arange(task.elements.start, task.elements.stop)
    elements = stored
    if task[Field.ROPE] == Pairing.HALF_SPLIT:
        head, within = np.divmod(stored, task.sizes.head_dim)
        apart = head * task.sizes.head_dim + within // 2 + within % 2 * (task.sizes.head_dim // 2)
        elements = np.where(_is_value(task, stored), stored, apart)
    order = np.argsort(elements)
    return Destinations(elements, order, elements[order][::TILE_ROWS] // TILE_ROWS)


def _is_value(task: Task, stored: Tiles) -> npt.NDArray[np.bool_]:
    head = stored // task.sizes.head_dim % (task.sizes.group + 2)
    return np.asarray(head == task.sizes.group + 1)


def frequencies(task: Task, where: Destinations) -> Floats:
    """Radians per position of every stored pair; values stay as they are, which is no turn."""
    stored = np.arange(task.elements.start, task.elements.stop, 2)
    pair = stored % task.sizes.head_dim // 2
    table = task.machine.frequencies[pair]
    return np.where(_is_value(task, stored), np.float32(0), table)


def _store(task: Task, tiles: Tiles, results: Floats) -> None:
    """Keys and values into the pages of their tokens, for later steps."""
    head_tiles = task.sizes.head_tiles
    first = task[Field.KV_HEAD] * task.sizes.qkv_tiles + task.sizes.group * head_tiles
    by_tile = results.reshape(len(results), -1, TILE_ROWS)
    for part in (0, 1):
        own = (tiles - first) // head_tiles == part
        if own.any():
            for state, values in zip(task.states().values(), by_tile[:, own], strict=True):
                task.store_token(state, part, (tiles[own] - first) % head_tiles, values.reshape(-1))
