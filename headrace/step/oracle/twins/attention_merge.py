"""ATTENTION_MERGE: the partial results of a row's chunks become its attention output."""

from __future__ import annotations

import numpy as np

from headrace.step.division import chunks_of
from headrace.step.isa import Buffer, Field
from headrace.step.oracle.arithmetic import Floats, exp
from headrace.step.oracle.core import Task


def attention_merge(task: Task) -> None:
    states, sizes = task.states(), task.sizes
    heads = range(task.tiles.start // sizes.head_tiles, (task.tiles.stop - 1) // sizes.head_tiles + 1)
    begin = heads.start * sizes.head_dim
    own = slice(task.elements.start - begin, task.elements.stop - begin)
    merged = []
    for row, state in states.items():
        chunks = chunks_of(state.position, task[Field.WINDOW]).count
        records: dict[int, Floats] = {}
        for kv_head in sorted({head // sizes.group for head in heads}):
            records[kv_head] = task.read(Buffer.PARTIALS, (row, kv_head, slice(0, chunks)))
        outputs = [merge(records[head // sizes.group], head % sizes.group, task) for head in heads]
        merged.append(np.concatenate(outputs)[own])
    task.write_rows(Buffer.ATTENTION_OUT, task.tiles, list(states), np.stack(merged))


def merge(records: Floats, member: int, task: Task) -> Floats:
    """One query head's output [head_dim] from the records of its chunks, in order."""
    group, dim = task.sizes.group, task.sizes.head_dim
    outputs = records[:, member * dim : (member + 1) * dim]
    maxima = records[:, group * dim + member]
    sums = records[:, group * (dim + 1) + member]
    scales = exp(maxima - maxima.max())
    output, total = np.zeros(dim, dtype=np.float32), np.float32(0)
    for chunk in range(len(records)):
        output = output + scales[chunk] * outputs[chunk]
        total = total + scales[chunk] * sums[chunk]
    return np.asarray(output / total, dtype=np.float32)
