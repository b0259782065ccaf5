"""The kernel's sampling on a Hopper GPU: exactly the tokens that the PyTorch path takes from the same logits.

A launch leaves the logits of its last step, so after a launch of one step the reference can be asked about
the very numbers that the kernel saw. Nothing here is up to a near-tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernel.check.kernels import logits_of, on_gpu
from headrace.model.config import ModelConfig
from headrace.model.constraint import mask_of
from headrace.model.kv import KVCache
from headrace.model.sampler import NO_TOKEN, Sampled, SampleRow
from headrace.model.sampling import SamplingParams
from headrace.step.isa import Buffer
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.world import VOCABULARY, World, model_of
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.model.slow_sampler import probabilities
from tests.model.statistics import chi_square
from tests.step.oracle.setting import PARAMS, TIED, expected, same, shallow

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

Rows = Sequence[LaunchRow | None]
Results = list[Sampled | None]
LIMIT, CERTAIN = 0.001, 1e-5  # p-values, as in tests/model/test_distribution.py


class Kernel(Protocol):
    """A launcher, or the oracle in its place: see test_sampling_bench.py."""

    def run(self, rows: Rows, steps: int) -> Iterator[Results]: ...

    def buffer(self, buffer: Buffer) -> Tensor: ...


class Bench:
    """A shallow model, so that sampling is what is tested, with sequences of given lengths."""

    device, sms = "cuda", 132

    def __init__(self, lengths: Sequence[int], rows: int, config: ModelConfig | None = None) -> None:
        self.world = World(config or shallow(), lengths, dtype=torch.bfloat16)
        self.plan = build_plan(self.world.config, rows=rows, sms=self.sms)

    def kernel(self, *, strict: bool = False) -> Kernel:
        packed = pack_model(self.world.model, device=self.device, dtype=torch.bfloat16)
        cache = KVCache(self.world.config, self.world.cache.blocks, dtype=torch.bfloat16, device=self.device)
        for pages, poisoned in zip(cache.pages, self.world.poisoned().pages, strict=True):
            pages.copy_(poisoned)
        blocks = max(len(table) for one in self.world.sequences for table in one.tables.values())
        return self.make(packed, cache, blocks, strict)

    def make(self, packed: PackedWeights, cache: KVCache, blocks: int, strict: bool) -> Kernel:
        return on_gpu(self.plan, packed, cache, blocks, strict)

    def logits(self, kernel: Kernel) -> Tensor:
        return logits_of_last_step(kernel, self.plan)

    def rows(self, params: Sequence[SamplingParams], seed: int = 0, **fields: Any) -> list[LaunchRow]:
        """A row for each sequence."""
        return [
            sequence.row(slot, one, seed=1000 * seed + slot, **fields)
            for slot, (sequence, one) in enumerate(zip(self.world.sequences, params, strict=True))
        ]


def logits_of_last_step(kernel: Any, plan: Plan) -> Tensor:
    return logits_of(kernel, plan).cpu()


EVERY = list(PARAMS.values())


def agree(bench: Bench, kernel: Kernel, rows: list[LaunchRow]) -> list[int]:
    """One step; tokens and log-probabilities are the reference's, given the kernel's logits."""
    [results] = kernel.run(rows, 1)
    wanted = expected(bench.logits(kernel)[: len(rows)], rows)
    same(results, wanted)
    return [want.token for want in wanted]


def advanced(rows: Sequence[LaunchRow], tokens: Sequence[int]) -> list[LaunchRow]:
    """The rows one step on; each keeps its prompt and its list of output, which grows, as in the engine."""
    following = []
    for row, token in zip(rows, tokens, strict=True):
        assert isinstance(row.output, list)
        row.output.append(token)
        following.append(replace(row, token=token, position=row.position + 1))
    return following


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_every_parameter_beside_others(count: int, strict: bool) -> None:
    bench = Bench([30] * count, count)
    kernel = bench.kernel(strict=strict)
    seen: set[int] = set()
    for seed in range(max(3, 2 * len(EVERY) // count)):
        params = [EVERY[(seed * count + index) % len(EVERY)] for index in range(count)]
        seen.update(agree(bench, kernel, bench.rows(params, seed)))
    assert len(seen) > 4


@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_by_itself(name: str) -> None:
    """Rounds that nobody needs are skipped; what remains must not lean on them."""
    bench = Bench([40, 41, 64], 4)
    kernel = bench.kernel()
    for seed in range(4):
        agree(bench, kernel, bench.rows([PARAMS[name]] * 3, seed))


@pytest.mark.parametrize(("count", "first"), [(1, 0), (1, 3), (1, 4), (16, 0)])
def test_many_steps_are_as_many_launches(count: int, first: int) -> None:
    """Penalties count what the launch has made, and from launch to launch nothing twice."""
    bench = Bench([30] * count, count)
    kinds = [PARAMS["penalties"], PARAMS["all three"], PARAMS["rewards"], PARAMS["logprobs greedy"]]
    kinds.append(SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.2))
    params = [kinds[(first + index) % len(kinds)] for index in range(count)]
    at_once, one_by_one = bench.kernel(), bench.kernel()
    rows = bench.rows(params)
    again = [replace(row, output=list(row.output)) for row in rows]
    for steps in (6, 1, 5):
        made = list(at_once.run(rows, steps))
        assert len(made) == steps
        for results in made:
            tokens = agree(bench, one_by_one, again)
            again = advanced(again, tokens)
            assert [result.token for result in results if result is not None] == tokens
            rows = advanced(rows, tokens)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_ties_go_to_the_lowest_ids(count: int) -> None:
    """The head repeats its rows, so that every logit comes many times, on many SMs."""
    config = shallow(seed=1)
    head = model_of(config, torch.bfloat16).get_parameter("head.weight")
    with torch.no_grad():
        head.copy_(head[torch.arange(VOCABULARY) % 9].clone())
    bench = Bench([30] * count, count, config)
    kernel = bench.kernel()
    for seed in range(12):
        params = [TIED[(seed + index) % len(TIED)] for index in range(count)]
        agree(bench, kernel, bench.rows(params, seed))


def test_forbidden_tokens_are_never_taken() -> None:
    bench = Bench([30] * 4, 4)
    kernel = bench.kernel()
    kinds = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=4.0),
        SamplingParams(top_k=6, top_p=0.9),
        SamplingParams(logit_bias={7: 100.0}),
    ]
    for tokens in ([3, 4, 150, 299], [8], list(range(0, VOCABULARY, 2))):
        rows = bench.rows(kinds, allowed=mask_of(tokens, VOCABULARY))
        rows[3] = replace(rows[3], allowed=None)
        taken = agree(bench, kernel, rows)
        assert set(taken[:3]) <= set(tokens)


def test_a_row_takes_what_it_takes_alone() -> None:
    bench = Bench([30] * 16, 16)
    rows = bench.rows([EVERY[index] for index in range(16)])
    [together] = bench.kernel().run(rows, 1)
    for index in (0, 6, 12, 15):
        alone: Rows = [row if place == index else None for place, row in enumerate(rows)]
        [results] = bench.kernel().run(alone, 1)
        assert results[index] == together[index]
        assert [place for place, result in enumerate(results) if result is not None] == [index]


@pytest.mark.parametrize("params", [*EVERY[:6], PARAMS["all three"], PARAMS["logprobs"]], ids=str)
def test_a_row_without_a_finite_logit_ends_alone(params: SamplingParams) -> None:
    bench = Bench([30] * 4, 4)
    kernel = bench.kernel()
    rows = bench.rows([params] * 4)
    rows[1] = replace(rows[1], allowed=mask_of([], VOCABULARY))
    made = list(kernel.run(rows, 2))
    assert made[0][1] == Sampled(NO_TOKEN)
    assert made[1][1] is None
    assert all(result is not None and result.token != NO_TOKEN for result in made[1][:1] + made[1][2:])
    healthy = [index for index in range(4) if index != 1]
    [first] = bench.kernel().run([row if index != 1 else None for index, row in enumerate(rows)], 1)
    assert [made[0][index] for index in healthy] == [first[index] for index in healthy]


def test_greedy_rows_alone_leave_the_buffers_of_the_rounds_alone() -> None:
    bench = Bench([30] * 2, 2)
    kernel = bench.kernel()
    list(kernel.run(bench.rows([PARAMS["greedy"], PARAMS["plain"]]), 3))
    assert bool((kernel.buffer(Buffer.TIES) == -1).all())  # as it was made
    assert not kernel.buffer(Buffer.HISTOGRAM).any()
    list(kernel.run(bench.rows([PARAMS["top_p"], PARAMS["top_k"]]), 3))
    assert not kernel.buffer(Buffer.HISTOGRAM).any()  # cleared for the next step
    assert bool((kernel.buffer(Buffer.TIES)[1, :, 0] >= 0).all())
    assert bool((kernel.buffer(Buffer.TIES)[1, :, 1] == -1).all())


DRAWS = 2000
COMBINATIONS: list[dict[str, Any]] = [
    {"temperature": 3.0},
    {"temperature": 3.0, "top_k": 12},
    {"temperature": 3.0, "top_p": 0.8},
    {"temperature": 3.0, "min_p": 0.3},
    {"temperature": 4.0, "top_k": 60, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 3.0, "repetition_penalty": 1.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 3.0, "logit_bias": {7: 4.0, 2: -3.0}},
]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_frequencies_follow_the_stated_distribution(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    bench = Bench([30], 1)
    kernel = bench.kernel()
    [row] = bench.rows([params])
    counts = np.zeros(VOCABULARY, dtype=np.int64)
    for seed in range(DRAWS):
        [[result]] = kernel.run([replace(row, seed=seed)], 1)
        assert result is not None
        counts[result.token] += 1
    logits = bench.logits(kernel)[0].tolist()
    given = SampleRow(params, seed=0, position=row.position + 1, prompt=row.prompt, output=row.output)
    assert chi_square(counts, DRAWS * probabilities(logits, given)) > LIMIT
    # What the test would say of a sampler with half the temperature, which filters in its own way too.
    colder = replace(given, params=replace(params, temperature=params.temperature / 2))
    assert chi_square(counts, DRAWS * probabilities(logits, colder)) < CERTAIN
