"""EXPERT_UP: gate and up of every active expert, of all rows."""

from __future__ import annotations

from headrace.step.division import share_of
from headrace.step.isa import TILE_ROWS, Buffer, Field
from headrace.step.layout import UNIT_ELEMENTS
from headrace.step.oracle.arithmetic import Floats, dot, silu
from headrace.step.oracle.core import Task

GATED_ROWS = 2 * TILE_ROWS  # gate and up in turn


def gated(inputs: Floats, weights: Floats) -> Floats:
    """silu(gate) * up of inputs [rows, k] for weights [outputs * 2, k]: [rows, outputs]."""
    products = dot(inputs, weights)
    return silu(products[:, 0::2]) * products[:, 1::2]


def expert_up(task: Task, experts: list[int]) -> None:
    rows, tiles = list(task.states()), task[Field.TILE_COUNT]
    items = share_of(len(experts) * tiles, task[Field.SHARE], task[Field.SHARES])
    if not items:
        return
    inputs = task.normalized(rows)
    tile_units = GATED_ROWS * task[Field.K] // UNIT_ELEMENTS
    for number in range(items.start // tiles, (items.stop - 1) // tiles + 1):
        low, high = max(items.start - number * tiles, 0), min(items.stop - number * tiles, tiles)
        offset = experts[number] * task[Field.EXPERT_STRIDE] + low * tile_units
        weights = task.weight_rows(tile_rows=GATED_ROWS, tiles=high - low, extra=offset)
        place = slice(number * tiles + low, number * tiles + high)
        task.write_rows(Buffer.HIDDEN, place, rows, gated(inputs, weights))


def hidden_tiles(k: int, number: int) -> slice:
    """Tiles of HIDDEN that the active expert of that number fills, k wide."""
    tiles = k // TILE_ROWS
    return slice(number * tiles, (number + 1) * tiles)
