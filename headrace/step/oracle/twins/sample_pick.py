"""SAMPLE_PICK: each SM's best token of every row."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from headrace.model import philox
from headrace.model.sampler import NO_TOKEN
from headrace.step.buffers import CANDIDATE
from headrace.step.isa import Buffer, Field, Flag
from headrace.step.oracle.core import Task
from headrace.step.oracle.rows import RowState
from headrace.step.oracle.selection import Selection
from headrace.step.oracle.twins.sample_select import (
    TOP_K,
    TOP_P,
    cut,
    cuts_top_k,
    cuts_top_p,
    scored,
)

Places = npt.NDArray[np.int64]

_SETTLED = 1e-9  # how far NumPy's logarithms may be from the C library's, with room to spare


def sample_pick(task: Task) -> None:
    stop = bool(task[Field.FLAGS] & Flag.WRITER) and task.launch.stop()
    for row, state in task.states().items():
        selection = task.core.selections[row]
        record = np.zeros(1, dtype=CANDIDATE)
        record["token"], record["top"]["token"] = NO_TOKEN, NO_TOKEN
        record["stop"] = stop
        place, value = pick(task, row, state, selection)
        if place is not None:
            record["value"], record["token"] = value, selection.ids[place]
            record["raw"] = selection.raw[place]
        if state.row.params.logprobs is not None:
            order = np.argsort(-selection.raw, kind="stable")[: state.row.params.logprobs]
            record["top"]["raw"][0, : len(order)] = selection.raw[order]
            record["top"]["token"][0, : len(order)] = selection.ids[order]
        task.write(Buffer.CANDIDATES, (task[Field.SHARE], row), record.view(np.int32))


def pick(task: Task, row: int, state: RowState, selection: Selection) -> tuple[int | None, float]:
    """The place of the SM's best token among its own, and the value by which it competes."""
    params = state.row.params
    if params.is_greedy:
        if not len(selection.ids):
            return None, -math.inf
        best = int(selection.adjusted.argmax())
        return best, float(selection.adjusted[best])
    scored(task, row, params)
    if cuts_top_p(params):
        cut(task, row, selection, TOP_P)
    elif cuts_top_k(params, task.sizes.vocabulary):
        cut(task, row, selection, TOP_K)
    assert selection.left is not None
    assert selection.scores is not None
    if params.min_p > 0.0:
        selection.left &= selection.scores >= np.float32(math.log(params.min_p))
    places = np.flatnonzero(selection.left & (selection.scores > -np.inf))
    if not len(places):
        return None, -math.inf
    return draw(selection, places, state.row.seed, state.position + 1)


def draw(selection: Selection, places: Places, seed: int, position: int) -> tuple[int, float]:
    """The largest score + noise; contenders closer than any logarithm's error are settled one by one."""
    assert selection.scores is not None
    ids = torch.from_numpy(selection.ids[places])
    uniforms = philox.uniform([seed], [position], torch.zeros_like(ids), ids).numpy().astype(np.float64)
    noisy = selection.scores[places].astype(np.float64) - np.log(-np.log1p(-uniforms))
    near = np.flatnonzero(noisy >= noisy.max() - _SETTLED)
    exact = [
        (float(selection.scores[places[one]]) + philox.gumbel_exact(float(uniforms[one])), -int(places[one]))
        for one in near
    ]
    value, negated = max(exact)
    return -negated, value
