"""FFN_UP: gate and up of a feed-forward that every row goes through."""

from __future__ import annotations

from headrace.step.isa import Buffer, Field
from headrace.step.oracle.core import Task
from headrace.step.oracle.twins.expert_up import GATED_ROWS, gated


def ffn_up(task: Task) -> None:
    rows = list(task.states())
    values = gated(task.normalized(rows), task.weight_rows(tile_rows=GATED_ROWS))
    task.write_rows(Buffer(task[Field.OUTPUT]), task.tiles, rows, values)
