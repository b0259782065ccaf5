"""FFN_DOWN: the down projection of a feed-forward that every row goes through, onto the residual."""

from __future__ import annotations

import numpy as np

from headrace.step.isa import Buffer, Field, Flag
from headrace.step.oracle.arithmetic import dot
from headrace.step.oracle.core import Task
from headrace.step.oracle.twins.expert_up import hidden_tiles


def ffn_down(task: Task) -> None:
    rows = list(task.states())
    inputs = task.read_rows(Buffer(task[Field.INPUT]), hidden_tiles(task[Field.K], 0), rows)
    values = dot(inputs, task.weight_rows())
    if task[Field.FLAGS] & Flag.HALVE:
        values = values / np.float32(2)
    task.add_residual(rows, values)
