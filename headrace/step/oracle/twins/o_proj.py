"""O_PROJ: attention's output, projected onto the residual."""

from __future__ import annotations

from headrace.step.isa import Buffer, Field
from headrace.step.oracle.arithmetic import dot
from headrace.step.oracle.core import Task


def o_proj(task: Task) -> None:
    rows = list(task.states())
    inputs = task.read_rows(Buffer(task[Field.INPUT]), slice(0, task.sizes.attention_tiles), rows)
    task.add_residual(rows, dot(inputs, task.weight_rows()))
