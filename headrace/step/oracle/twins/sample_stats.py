"""SAMPLE_STATS: what all SMs must know of each other's logits before they sample."""

from __future__ import annotations

import numpy as np

from headrace.model.sampler import NO_TOKEN
from headrace.step.buffers import STAT
from headrace.step.isa import TILE_ROWS, Buffer, Field
from headrace.step.oracle.arithmetic import Floats
from headrace.step.oracle.core import Task
from headrace.step.oracle.memory import Array
from headrace.step.oracle.selection import Selection, adjusted


def sample_stats(task: Task) -> None:
    core, vocabulary = task.core, task.sizes.vocabulary
    ids = np.arange(task.elements.start, max(task.elements.start, min(task.elements.stop, vocabulary)))
    core.selections = {}
    for row, state in task.states().items():
        raw = own_logits(task, row)[: len(ids)]
        selection = Selection(ids, raw, adjusted(raw, ids, state))
        core.selections[row] = selection
        record = np.zeros(1, dtype=STAT)
        record["largest"], record["best"], record["token"] = -np.inf, -np.inf, NO_TOKEN
        if len(ids):
            largest = raw.max()
            with np.errstate(invalid="ignore"):
                record["sum"] = np.exp(raw.astype(np.float64) - np.float64(largest)).sum()
            record["largest"] = largest
            place = int(selection.adjusted.argmax())
            record["best"], record["token"] = selection.adjusted[place], ids[place]
        task.write(Buffer.STATS, (task[Field.SHARE], row), record.view(np.int32))


def own_logits(task: Task, row: int) -> Floats:
    """A row's logits of the task's tiles, padding included."""
    logits = task.core.logits
    if task[Field.TILE_COUNT] == 0:
        return np.empty(0, dtype=np.float32)
    assert logits is not None
    begin = task.tiles.start - logits.first
    tiles = logits.values[begin : begin + task[Field.TILE_COUNT], row]
    return np.ascontiguousarray(tiles).reshape(-1, TILE_ROWS).reshape(-1)


def read_stats(task: Task, row: int) -> Array:
    """STATS of a row from every share."""
    words = task.read(Buffer.STATS, (slice(None), row))
    return np.ascontiguousarray(words).view(STAT)[:, 0]


def best_of(stats: Array) -> tuple[np.float32, int]:
    """The largest adjusted logit and its lowest token; NO_TOKEN if that logit is not a finite number."""
    values = stats["best"]
    place = int(values.argmax())
    token = int(stats["token"][place]) if np.isfinite(values[place]) else NO_TOKEN
    return np.float32(values[place]), token
