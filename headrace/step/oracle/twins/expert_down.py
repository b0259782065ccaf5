"""EXPERT_DOWN: each row's own experts, weighed and added to the residual in index order."""

from __future__ import annotations

import numpy as np

from headrace.step.isa import TILE_ROWS, Buffer, Field, Flag
from headrace.step.oracle.arithmetic import dot
from headrace.step.oracle.core import Task
from headrace.step.oracle.twins.expert_up import hidden_tiles
from headrace.step.oracle.twins.router import chosen, expert_weights


def expert_down(task: Task, experts: list[int]) -> None:
    choice = chosen(task)
    weights = expert_weights(task, choice)
    rows = list(choice)
    total = np.zeros((len(rows), task[Field.TILE_COUNT] * TILE_ROWS), dtype=np.float32)
    for number, expert in enumerate(experts):
        users = [index for index, row in enumerate(rows) if expert in choice[row]]
        own = [rows[index] for index in users]
        inputs = task.read_rows(Buffer(task[Field.INPUT]), hidden_tiles(task[Field.K], number), own)
        products = dot(inputs, task.weight_rows(extra=expert * task[Field.EXPERT_STRIDE]))
        shares = [weights[row][choice[row].index(expert)] for row in own]
        total[users] += np.array(shares, dtype=np.float32)[:, None] * products
    if task[Field.FLAGS] & Flag.HALVE:
        total = total / np.float32(2)
    task.add_residual(rows, total)
