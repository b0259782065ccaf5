"""EMBED: the residual begins as the embedding of each row's token."""

from __future__ import annotations

import numpy as np

from headrace.step.isa import TILE_ROWS, Buffer, Field
from headrace.step.layout import UNIT_ELEMENTS
from headrace.step.oracle.arithmetic import Floats
from headrace.step.oracle.core import PrivateTiles, Task


def embedding(task: Task, token: int) -> Floats:
    """The task's elements of a token's embedding."""
    tile, row = divmod(token, TILE_ROWS)
    offset = task[Field.WEIGHTS] + tile * (TILE_ROWS * task[Field.K] // UNIT_ELEMENTS)
    rows = task.machine.weights.rows(offset, 1, task[Field.K])
    return rows[row, task.elements.start : task.elements.stop]


def embed(task: Task) -> None:
    states = task.states()
    rows = list(states)
    values = np.stack([embedding(task, state.token) for state in states.values()])
    task.core.residual = PrivateTiles(task.tiles.start, task.tiled(rows, values))
    task.write(Buffer.X, task.tiles, task.core.residual.values)
