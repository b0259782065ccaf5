"""SAMPLE_COMMIT: every SM finds the same token of every row, and moves its own copy of the rows on."""

from __future__ import annotations

import math

import numpy as np

from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import TokenLogprobs
from headrace.step.buffers import CANDIDATE
from headrace.step.division import share_of
from headrace.step.isa import DIGITS, Buffer, Field, Flag
from headrace.step.oracle.core import Task
from headrace.step.oracle.memory import Array
from headrace.step.oracle.twins.sample_stats import best_of, read_stats


def sample_commit(task: Task) -> None:
    active = task.states()
    results: list[Sampled | None] = [None] * task.sizes.rows
    stop = False
    for row, state in active.items():
        words = task.read(Buffer.CANDIDATES, (slice(None), row))
        candidates = np.ascontiguousarray(words).view(CANDIDATE)[:, 0]
        stop = stop or bool(candidates["stop"].any())
        results[row] = reduced(task, row, candidates, state.row.params.logprobs)
    _clear(task)
    task.publish_pages()
    states = task.change_states()
    for row, state in active.items():
        result = results[row]
        assert result is not None
        state.commit(result.token)
    if task[Field.FLAGS] & Flag.WRITER:
        task.launch.ring.append(results)
    last = task.epoch == task.launch.last
    task.core.finished = stop or last or not states.active()


def reduced(task: Task, row: int, candidates: Array, logprobs: int | None) -> Sampled:
    """The token of a row, with log-probabilities where asked."""
    stats = read_stats(task, row)
    if best_of(stats)[1] == NO_TOKEN:
        return Sampled(NO_TOKEN)
    values = np.where(candidates["token"] == NO_TOKEN, -math.inf, candidates["value"])
    winner = candidates[int(values.argmax())]
    token = int(winner["token"])
    if logprobs is None:
        return Sampled(token)
    present = [one for one in stats if one["token"] != NO_TOKEN]
    largest = max(float(one["largest"]) for one in present)
    total = sum(float(one["sum"]) * math.exp(float(one["largest"]) - largest) for one in present)
    base = largest + math.log(total)
    offered = candidates["top"].reshape(-1)
    best = sorted((-float(one["raw"]), int(one["token"])) for one in offered if one["token"] != NO_TOKEN)
    top = tuple((number, -negated - base) for negated, number in best[:logprobs])
    return Sampled(token, TokenLogprobs(token, float(winner["raw"]) - base, top))


def _clear(task: Task) -> None:
    """This share's part of HISTOGRAM, rows of bins, for the next step."""
    rows = task.sizes.rows
    for number in share_of(2 * DIGITS * rows, task[Field.SHARE], task[Field.SHARES]):
        task.clear(Buffer.HISTOGRAM, divmod(number, rows))
