"""ROUTER: a logit for every expert; and the choice that every SM makes from them for itself."""

from __future__ import annotations

import numpy as np

from headrace.step.division import active_experts
from headrace.step.isa import Buffer, Field, Flag
from headrace.step.oracle.arithmetic import Floats, dot, fold, sigmoid
from headrace.step.oracle.core import Task
from headrace.step.sizes import tiles


def router(task: Task) -> None:
    rows = list(task.states())
    logits = dot(task.normalized(rows), task.weight_rows())
    task.write_rows(Buffer.ROUTER_LOGITS, task.tiles, rows, logits)


def read_logits(task: Task, rows: list[int]) -> Floats:
    """The router's logits of rows, without padding: [len(rows), EXPERTS]."""
    logits = task.read_rows(Buffer.ROUTER_LOGITS, slice(0, tiles(task[Field.EXPERTS])), rows)
    return logits[:, : task[Field.EXPERTS]]


def chosen(task: Task) -> dict[int, list[int]]:
    """The experts of every active row, ascending: the TOP_K largest logits, ties to the lowest index."""
    rows = list(task.states())
    order = np.argsort(-read_logits(task, rows), axis=1, kind="stable")[:, : task[Field.TOP_K]]
    return {row: sorted(experts.tolist()) for row, experts in zip(rows, order, strict=True)}


def list_experts(task: Task) -> list[int]:
    """What a loader finds before it fetches the pages of experts: those that are active."""
    return active_experts(list(chosen(task).values()))


def expert_weights(task: Task, choice: dict[int, list[int]]) -> dict[int, Floats]:
    """The weight of each of a row's experts, in the order of `choice`."""
    rows = list(choice)
    logits = read_logits(task, rows)
    weights = {row: sigmoid(own[choice[row]]) for row, own in zip(rows, logits, strict=True)}
    if task[Field.FLAGS] & Flag.NORMALIZE:
        weights = {row: _shares(values) for row, values in weights.items()}
    return weights


def _shares(weights: Floats) -> Floats:
    """Divided by their sum; the smallest float32 only keeps 0 / 0 out."""
    total = np.maximum(fold(weights), np.finfo(np.float32).tiny, dtype=np.float32)
    return np.asarray(weights / total, dtype=np.float32)
