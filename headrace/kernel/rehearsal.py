"""What first launches would take longer for, done beforehand.

CUDA loads a kernel when it is first launched, though its module was made before: when a fifth sequence joins
four, the kernel for 8 rows may never have run. And a launcher makes the arrays of penalties, masks and
adjusted logits, some of them in pinned memory, for the first row that needs them. All rows would wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from headrace.model.config import KVGroup
from headrace.model.constraint import mask_of
from headrace.model.kv import BlockTables, KVCache
from headrace.model.sampler import Sampled
from headrace.model.sampling import MAX_LOGPROBS, SamplingParams
from headrace.step.oracle.rows import LaunchRow

logger = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0)
# Everything that sampling does, and has an array for. On the device these are a little more than 8 bytes for
# each token of the vocabulary and row: 66 MB for the 31 rows of all capacities and 262,144 tokens.
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=MAX_LOGPROBS,
)


class Launches(Protocol):
    """A kernel: `headrace.kernel.launcher.Launcher` is one."""

    def run(
        self, rows: Sequence[LaunchRow | None], steps: int, stop: Callable[[], bool] = ...
    ) -> Iterator[list[Sampled | None]]: ...

    def forget(self) -> None: ...


def rehearse(launchers: Mapping[int, Launches], cache: KVCache, vocabulary: int) -> None:
    """Launch the kernel of every row capacity with as many rows, greedy ones and such that take everything.

    Each launch comes twice, and the log has the times of both. Rows write to block 0, which is cleared:
    nobody may hold it.
    """
    begun, told = time.perf_counter(), []
    for capacity, launcher in launchers.items():
        greedy, full = (rows(capacity, vocabulary, params) for params in (GREEDY, EVERYTHING))
        first, again, sampled, at_last = (_time(launcher, given) for given in (greedy, greedy, full, full))
        launcher.forget()
        told.append(f"{capacity}: {first:.1f}, then {again:.1f}, sampled {sampled:.1f}, then {at_last:.1f}")
    for pages in cache.pages:
        pages[0] = 0
    seconds = time.perf_counter() - begun
    logger.info("decode kernels were launched in %.2f s; ms by rows: %s", seconds, "; ".join(told))


def rows(count: int, vocabulary: int, params: SamplingParams) -> list[LaunchRow]:
    """The first tokens of one sequence, all in block 0; those that are not greedy are held to a grammar."""
    tables: BlockTables = {group: [0] for group in KVGroup}
    tokens = [7 * index % vocabulary for index in range(count)]  # they differ: many experts are chosen
    allowed = None if params.is_greedy else mask_of(range(vocabulary), vocabulary)
    return [
        LaunchRow(
            slot=0,
            token=token,
            position=position,
            tables=tables,
            params=params,
            prompt=tokens[:1],
            output=tokens[: position + 1],
            max_tokens=1,
            allowed=allowed,
        )
        for position, token in enumerate(tokens)
    ]


def _time(launcher: Launches, given: Sequence[LaunchRow]) -> float:
    """Milliseconds of a launch of one step."""
    begun = time.perf_counter()
    for _ in launcher.run(given, 1):
        pass
    return 1e3 * (time.perf_counter() - begun)
