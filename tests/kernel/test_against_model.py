"""The kernel on a Hopper GPU against the PyTorch model: as near to float32 as PyTorch's own bfloat16 is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.kernel.launcher import Launcher
from headrace.model.batch import Span
from headrace.model.build import build_model
from headrace.model.checkpoint import load_model
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import KVCache, blocks_for
from headrace.model.presets import PRESETS
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import synthetic_model
from headrace.model.transformer import Model
from headrace.step.isa import Buffer
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import pack_model
from headrace.step.planner import build_plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

GREEDY = SamplingParams(temperature=0)
MICRO = Path(__file__).parents[2] / "models" / "north-micro"
NORTH = PRESETS["north-mini-code"]
NOISE = 1.5  # how many times PyTorch's own error in bfloat16 the kernel's may be
ROOM = 64  # tokens that a sequence may grow by


class Bench:
    """A model in bfloat16, prompts whose KV both it and a kernel have, and the rows that come next."""

    def __init__(self, model: Model, lengths: Sequence[int], rows: int) -> None:
        generator = random.Random(5)
        config = model.config
        self.model, self.rows = model, rows
        self.prompts = [[generator.randrange(5, config.vocab_size) for _ in range(size)] for size in lengths]
        blocks, self.tables = deal(config, lengths, generator)
        self.cache = KVCache(config, blocks, dtype=torch.bfloat16, device="cuda")
        for prompt, tables in zip(self.prompts, self.tables, strict=True):
            if len(prompt) > 1:
                model([Span(prompt[:-1], 0, tables)], self.cache)
        own = KVCache(config, blocks, dtype=torch.bfloat16, device="cuda")
        for pages, filled in zip(own.pages, self.cache.pages, strict=True):
            pages.copy_(filled)
        self.kernel = Launcher(
            build_plan(config, rows=rows, sms=132),
            pack_model(model, device="cuda", dtype=torch.bfloat16),
            own,
            table_blocks=max(len(table) for tables in self.tables for table in tables.values()),
        )
        self.fed = [
            LaunchRow(slot=slot, token=prompt[-1], position=len(prompt) - 1, tables=tables, params=GREEDY)
            for slot, (prompt, tables) in enumerate(zip(self.prompts, self.tables, strict=True))
        ]

    def kernel_logits(self) -> Tensor:
        list(self.kernel.launch(self.fed, 1))
        tiles = self.kernel.buffer(Buffer.LOGITS).permute(1, 0, 2)
        return tiles.reshape(self.rows, -1)[: len(self.fed), : self.model.config.vocab_size].clone()

    def model_logits(self, fed: Sequence[LaunchRow]) -> Tensor:
        spans = [Span([row.token], row.position, row.tables) for row in fed]
        return self.model.logits(self.model(spans, self.cache))

    def exact_logits(self) -> Tensor:
        """In float32, without a cache."""
        exact = build_model(self.model.config, device="cuda", dtype=torch.float32)
        with torch.no_grad():
            for wide, stored in zip(exact.parameters(), self.model.parameters(), strict=True):
                wide.copy_(stored)
            whole = [torch.tensor([prompt], device="cuda") for prompt in self.prompts]
            return torch.cat([exact.full(prompt)[:, -1] for prompt in whole])


def deal(
    config: ModelConfig, lengths: Sequence[int], generator: random.Random
) -> tuple[dict[KVGroup, int], list[dict[KVGroup, list[int]]]]:
    """Block counts, and a table for each sequence, of blocks scattered at random."""
    per = [blocks_for(length + ROOM) for length in lengths]
    groups = [group for group in KVGroup if config.layers_in(group)]
    free = {group: generator.sample(range(sum(per)), sum(per)) for group in groups}
    tables = [{group: [free[group].pop() for _ in range(count)] for group in groups} for count in per]
    return {group: sum(per) for group in groups}, tables


def error(ours: Tensor, right: Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


def near_the_truth(bench: Bench) -> None:
    ours = bench.kernel_logits()
    theirs, exact = bench.model_logits(bench.fed), bench.exact_logits()
    assert error(ours, exact) <= NOISE * error(theirs, exact)


def micro() -> Model:
    return load_model(MICRO, device="cuda", dtype=torch.bfloat16, progress=None)


LENGTHS = [([300], 1), ([1, 256, 257], 4), ([5, 63, 64, 65, 128, 255, 400, 700], 8)]


@pytest.mark.parametrize(("lengths", "rows"), LENGTHS)
def test_logits_of_north_micro(lengths: list[int], rows: int) -> None:
    near_the_truth(Bench(micro(), lengths, rows))


@pytest.mark.parametrize(("lengths", "rows"), [([4500], 1), ([1, 64, 65, 500, 4095, 4096, 4097, 4200], 8)])
def test_logits_at_norths_widths(lengths: list[int], rows: int) -> None:
    """Five of North's layers: the dense one, three with a window, one without positions."""
    shape = replace(NORTH, layers=NORTH.layers[:5])
    near_the_truth(Bench(synthetic_model(shape, seed=1, device="cuda", dtype=torch.bfloat16), lengths, rows))


@pytest.mark.parametrize(("lengths", "rows"), LENGTHS)
def test_greedy_tokens_of_north_micro_up_to_a_near_tie(lengths: list[int], rows: int) -> None:
    """The model follows the kernel's tokens, and would have taken each itself but for rounding."""
    bench = Bench(micro(), lengths, rows)
    # The largest and the token's logit, each off by as much as either side's roundings make it.
    noise = 4 * float((bench.model_logits(bench.fed) - bench.exact_logits()).abs().max())
    fed = bench.fed
    made = [tokens for _ in range(2) for tokens in launched(bench, 16)]
    for tokens in made:
        logits = bench.model_logits(fed)
        taken = torch.tensor(tokens, device="cuda")[:, None]
        margins = logits.max(1).values - logits.gather(1, taken)[:, 0]
        assert float(margins.max()) <= noise
        fed = advanced(fed, tokens)


def launched(bench: Bench, steps: int) -> list[list[int]]:
    """Tokens of the next steps, after which the bench's rows stand."""
    made = [
        [token for token in tokens if token is not None] for tokens in bench.kernel.launch(bench.fed, steps)
    ]
    for tokens in made:
        bench.fed = advanced(bench.fed, tokens)
    return made


def advanced(rows: Sequence[LaunchRow], tokens: Sequence[int]) -> list[LaunchRow]:
    return [
        replace(row, token=token, position=row.position + 1) for row, token in zip(rows, tokens, strict=True)
    ]
