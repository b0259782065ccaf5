"""The kernel's sampling, run thread by thread on the host: exactly the tokens of the PyTorch path's sampler.

Needs a C++ compiler, not a GPU; what it leaves open is in `tests.kernel.emulated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.model.constraint import mask_of
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import SamplingParams
from headrace.step.isa import Buffer
from headrace.step.oracle.rows import LaunchRow
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.kernel.emulated import COMPILER, EmulationError, Library
from tests.kernel.emulated.sampling import Emulated, Floats, compiled
from tests.kernel.test_sampling_on_gpu import EVERY
from tests.step.oracle.setting import PARAMS, TIED, expected, same, shallow

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# Row capacity, SMs, vocabulary. The second has SMs with several rounds of tokens a thread, and a padded tile.
SHAPES = [(1, 2, 300), (2, 2, 5003), (4, 3, 300), (16, 2, 300)]
TIES = [*TIED, SamplingParams(top_p=0.5, temperature=300.0, logprobs=5)]


@cache
def plan_of(rows: int, sms: int, vocabulary: int) -> Plan:
    return build_plan(replace(shallow(), vocab_size=vocabulary), rows=rows, sms=sms)


_libraries: dict[tuple[int, int, int], Library] = {}


@pytest.fixture
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    shape = request.param
    if shape not in _libraries:
        _libraries[shape] = compiled(plan_of(*shape), tmp_path_factory.mktemp("emulated"))
    return Emulated(plan_of(*shape), _libraries[shape])


def on(*shapes: tuple[int, int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("emulated", shapes, indirect=True, ids=str)


def rows_of(
    params: Sequence[SamplingParams], vocabulary: int, generator: np.random.Generator
) -> list[LaunchRow]:
    """Rows with a past of their own, every third of them under a mask."""
    rows = []
    for slot, one in enumerate(params):
        allowed = mask_of(generator.choice(vocabulary, vocabulary // 3, replace=False), vocabulary)
        output = generator.integers(vocabulary, size=20).tolist()
        rows.append(
            LaunchRow(
                slot=slot,
                token=output[-1],
                position=int(generator.integers(100_000)),
                tables={},
                params=one,
                seed=int(generator.integers(2**63)),
                prompt=generator.integers(vocabulary, size=20).tolist(),
                output=output,
                allowed=allowed if generator.random() < 0.3 else None,
            )
        )
    return rows


def agree(emulated: Emulated, kinds: Sequence[SamplingParams], seed: int, *, ties: bool = False) -> None:
    """One step; tokens and log-probabilities are the reference's. The seed shuffles the threads."""
    sizes, generator = emulated.plan.sizes, np.random.default_rng(seed)
    logits = (3 * generator.standard_normal((1, sizes.rows, sizes.vocabulary))).astype(np.float32)
    if ties:
        logits = np.round(logits)
    params = [kinds[(seed * sizes.rows + index) % len(kinds)] for index in range(sizes.rows)]
    rows = rows_of(params, sizes.vocabulary, generator)
    [results] = emulated.run(rows, logits, seed)
    same(results, expected(torch.from_numpy(logits[0]), rows))
    assert not emulated.buffer(Buffer.HISTOGRAM).any()  # cleared for the next step


def agree_often(emulated: Emulated) -> None:
    for seed in range(4):
        agree(emulated, TIES, seed, ties=True)


def times(emulated: Emulated, kinds: Sequence[SamplingParams]) -> range:
    """Rounds after which every kind has had its turn."""
    return range(-(-len(kinds) // emulated.plan.sizes.rows))


@on(*SHAPES)
def test_every_parameter(emulated: Emulated) -> None:
    for seed in times(emulated, EVERY):
        agree(emulated, EVERY, seed)


@on(*SHAPES[1:])
def test_ties_go_to_the_lowest_ids(emulated: Emulated) -> None:
    for seed in times(emulated, TIES):
        agree(emulated, TIES, seed, ties=True)


KINDS = [
    PARAMS["penalties"],
    SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.2),
    PARAMS["logprobs greedy"],
    PARAMS["all three"],
]


def noisy(generator: np.random.Generator, base: Floats, steps: int) -> Floats:
    """Logits of several steps that are much alike: the same tokens come again, so penalties matter."""
    noise = generator.standard_normal((steps, *base.shape)) * 0.3
    return (base + noise).astype(np.float32)


@on((4, 3, 300))
def test_steps_and_launches_follow_one_another(emulated: Emulated) -> None:
    """Penalties count every token once; a row that reached its length, or is no number, is over alone."""
    sizes, generator, steps = emulated.plan.sizes, np.random.default_rng(5), 5
    rows = [replace(row, allowed=None) for row in rows_of(KINDS, sizes.vocabulary, generator)]
    base = (3 * generator.standard_normal((sizes.rows, sizes.vocabulary))).astype(np.float32)
    for launch in range(3):
        rows[2] = replace(rows[2], max_tokens=steps - launch)
        logits = noisy(generator, base, steps)
        if launch == 2:
            logits[1, 3, 17] = np.nan
        made = emulated.run(rows, logits, launch)
        assert len(made) == steps
        rows = followed(rows, logits, made)


def followed(rows: list[LaunchRow], logits: Floats, made: list[list[Sampled | None]]) -> list[LaunchRow]:
    """The rows after a launch, each of whose results is the reference's."""
    over: set[int] = set()
    for step, results in enumerate(made):
        wanted = expected(torch.from_numpy(logits[step]), rows)
        for index, (row, want) in enumerate(zip(rows, wanted, strict=True)):
            if index in over:
                assert results[index] is None
                continue
            same([results[index]], [want])
            if want.token == NO_TOKEN or row.max_tokens == step + 1:
                over.add(index)
            if want.token != NO_TOKEN:
                assert isinstance(row.output, list)
                row.output.append(want.token)
                rows[index] = replace(row, token=want.token, position=row.position + 1)
    return rows


@on((4, 3, 300))
def test_rounds_that_nobody_needs_leave_their_buffers_alone(emulated: Emulated) -> None:
    agree(emulated, [PARAMS["greedy"], PARAMS["plain"], PARAMS["min_p"]], 1)
    assert (emulated.buffer(Buffer.TIES) == -1).all()
    agree(emulated, [PARAMS["top_p"]], 1)
    ties = emulated.buffer(Buffer.TIES).reshape(2, -1)
    assert (ties[0] == -1).all()
    assert (ties[1] >= 0).all()


BREAKS = {
    "some lanes leave out an exchange": (
        "ops/sample_select.h",
        "same = amount != 0 && digit == its_digit",
        "same = amount != 0 && digit == __shfl_sync(~0u, digit, leader)",
        EmulationError,
    ),
    "one equal too few": ("border.h", "token <= last_equal", "token < last_equal", AssertionError),
    "noise of the position before": (
        "ops/sample_pick.h",
        ".position[row] + 1",
        ".position[row]",
        AssertionError,
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_seen(name: str, tmp_path: Path) -> None:
    header, words, others, error = BREAKS[name]
    shape = (4, 3, 300)
    emulated = Emulated(plan_of(*shape), compiled(plan_of(*shape), tmp_path, (header, words, others)))
    with pytest.raises(error):
        agree_often(emulated)
