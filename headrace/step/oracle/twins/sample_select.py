"""SAMPLE_SELECT: one round of the search for the borders of top_k and top_p."""

from __future__ import annotations

import numpy as np

from headrace.model.sampler import NO_TOKEN
from headrace.model.sampling import SamplingParams
from headrace.step.isa import DIGITS, Buffer, Field, Round
from headrace.step.oracle.clocks import Target
from headrace.step.oracle.core import Task
from headrace.step.oracle.errors import HazardError
from headrace.step.oracle.selection import Border, Selection
from headrace.step.oracle.twins.sample_stats import best_of, read_stats

TOP_K, TOP_P = 0, 1  # the first index of TIES


def cuts_top_k(params: SamplingParams, vocabulary: int) -> bool:
    """Whether top_k removes tokens, so that its rounds are needed."""
    return not params.is_greedy and 0 < params.top_k < vocabulary


def cuts_top_p(params: SamplingParams) -> bool:
    return not params.is_greedy and params.top_p < 1.0


def takers(task: Task) -> dict[int, SamplingParams]:
    """The active rows that need this round."""
    top_p = task[Field.ROUND] >= Round.TOP_P_DIGIT_0
    rows = {row: state.row.params for row, state in task.states().items()}
    vocabulary = task.sizes.vocabulary
    return {
        row: params
        for row, params in rows.items()
        if (cuts_top_p(params) if top_p else cuts_top_k(params, vocabulary))
    }


def waits(task: Task) -> list[Target]:
    """A round that nobody needs waits for nothing."""
    if not takers(task) or not task[Field.WAIT_COUNTER]:
        return []
    return [Target(task[Field.WAIT_COUNTER], task.epoch * task[Field.WAIT_ARRIVALS])]


def scored(task: Task, row: int, params: SamplingParams) -> Selection:
    """The SM's selection of a row, its scores worked out."""
    selection = task.core.selections[row]
    if selection.scores is None:
        best, token = best_of(read_stats(task, row))
        if token == NO_TOKEN:  # the row ends here: what it draws is thrown away, and must only be a number
            selection.adjusted = np.zeros_like(selection.adjusted)
            best = np.float32(0)
        selection.score(best, params.temperature)
    return selection


def sample_select(task: Task) -> None:
    number = Round(task[Field.ROUND])
    kind, step = divmod(int(number), DIGITS + 1)
    for row, params in takers(task).items():
        selection = scored(task, row, params)
        if step == 0:
            begin(task, row, selection, params, kind)
        else:
            settle(task, row, selection, params, kind, step - 1)
        if step < DIGITS:
            histogram = selection.count(weighted=kind == TOP_P)
            task.add(Buffer.HISTOGRAM, (kind * DIGITS + step, row), histogram)
        else:
            ties = np.int32(selection.ties().sum())
            task.write(Buffer.TIES, (kind, task[Field.SHARE], row), np.asarray(ties))


def begin(task: Task, row: int, selection: Selection, params: SamplingParams, kind: int) -> None:
    """Start a search; top_p looks at what top_k has left."""
    if kind == TOP_K:
        selection.border = Border(needed=params.top_k)
        return
    if cuts_top_k(params, task.sizes.vocabulary):
        cut(task, row, selection, TOP_K)
    selection.border = Border(needed=0)
    selection.weigh()


def settle(task: Task, row: int, selection: Selection, params: SamplingParams, kind: int, digit: int) -> None:
    """Find a digit from the histogram of the round before."""
    assert selection.border is not None
    histogram = task.read(Buffer.HISTOGRAM, (kind * DIGITS + digit, row))
    if kind == TOP_P and digit == 0:
        total = sum(int(weight) for weight in histogram)
        numerator, denominator = params.top_p.as_integer_ratio()
        selection.border.needed = -(-total * numerator // denominator)  # rounded up
    try:
        selection.border.settle(histogram)
    except ValueError as error:
        place = f"HISTOGRAM[{kind * DIGITS + digit}, {row}]"
        raise HazardError(f"{task} reads what not all SMs have added to: {place} {error}") from error


def cut(task: Task, row: int, selection: Selection, kind: int) -> None:
    """End a search: remove what is below the border, and the surplus at it, lowest ids first to stay."""
    border = selection.border
    assert border is not None
    ties = task.read(Buffer.TIES, (kind, slice(None), row))
    missing = border.needed - border.above
    if kind == TOP_P:
        missing = -(-missing // weight_at(border.prefix))
    before = int(ties[: task[Field.SHARE]].sum())
    selection.cut(missing - before)


def weight_at(key: int) -> int:
    """The weight of a token whose score has this key."""
    bits = np.uint32(key ^ 0x80000000 if key & 0x80000000 else ~key & 0xFFFFFFFF)
    single = Selection(np.zeros(1, dtype=np.int64), np.zeros(1, np.float32), np.zeros(1, np.float32))
    single.scores = np.array([bits], dtype=np.uint32).view(np.float32)
    single.weigh()
    assert single.weights is not None
    return int(single.weights[0])
