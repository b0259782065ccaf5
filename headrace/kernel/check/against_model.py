"""The kernel against the PyTorch model: as near to float32 as PyTorch's own bfloat16 is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernel.check.exact import float32_model
from headrace.kernel.check.kernels import MakeKernel, advanced, logits_of, on_gpu
from headrace.model.batch import Span
from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import KVCache, blocks_for
from headrace.model.presets import PRESETS
from headrace.model.sampling import SamplingParams
from headrace.model.transformer import Model
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import PackedWeights, pack_model
from headrace.step.planner import build_plan

NOISE = 1.5  # how many times PyTorch's own error in bfloat16 the kernel's may be
ROOM = 64  # tokens that a sequence may grow by

# Five of North's layers: the dense one, three with a window, one without positions.
NORTH = PRESETS["north-mini-code"]
NORTHS_WIDTHS = replace(NORTH, layers=NORTH.layers[:5])

# Lengths of the sequences: North's around its window, north-micro's around pages' edges and its window.
WIDE_SETTINGS = [([4500], 1), ([1, 64, 65, 500, 4095, 4096, 4097, 4200], 8)]
MICRO_SETTINGS = [([300], 1), ([1, 256, 257], 4), ([5, 63, 64, 65, 128, 255, 400, 700], 8)]

_GREEDY = SamplingParams(temperature=0)


class ModelBench:
    """A model in bfloat16, prompts whose KV both it and a kernel have, and the rows that come next.

    `packed` are the model's weights if it reads them there (`headrace.step.packed_model`). Sequences may grow
    by `room` tokens.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        rows: int,
        *,
        packed: PackedWeights | None = None,
        room: int = ROOM,
        make: MakeKernel = on_gpu,
        sms: int = 132,
    ) -> None:
        config, device = model.config, model.device
        self.model = model
        self.exact = float32_model(config, model.get_parameter if packed is None else packed.get)
        self.prompts = [list(prompt) for prompt in prompts]
        blocks, self.tables = deal(config, [len(prompt) + room for prompt in prompts], random.Random(5))
        self.cache = KVCache(config, blocks, dtype=torch.bfloat16, device=device)
        for prompt, tables in zip(self.prompts, self.tables, strict=True):
            if len(prompt) > 1:
                model([Span(prompt[:-1], 0, tables)], self.cache)
        own = KVCache(config, blocks, dtype=torch.bfloat16, device=device)
        for pages, filled in zip(own.pages, self.cache.pages, strict=True):
            pages.copy_(filled)
        self.plan = build_plan(config, rows=rows, sms=sms)
        if packed is None:
            packed = pack_model(model, device=device, dtype=torch.bfloat16)
        longest = max(len(table) for tables in self.tables for table in tables.values())
        self.kernel = make(self.plan, packed, own, longest, False)
        self.fed = [
            LaunchRow(slot=slot, token=prompt[-1], position=len(prompt) - 1, tables=tables, params=_GREEDY)
            for slot, (prompt, tables) in enumerate(zip(self.prompts, self.tables, strict=True))
        ]

    def kernel_logits(self) -> Tensor:
        """What the kernel makes of the rows, as the other two float32 [rows, vocabulary]."""
        list(self.kernel.launch(self.fed, 1))
        return logits_of(self.kernel, self.plan)[: len(self.fed)]

    def model_logits(self) -> Tensor:
        """What PyTorch makes of them in bfloat16, with its own KV."""
        spans = [Span([row.token], row.position, row.tables) for row in self.fed]
        return self.model.logits(self.model(spans, self.cache))

    def exact_logits(self) -> Tensor:
        """Of the prompts in float32, without a cache."""
        with torch.no_grad():
            whole = [torch.tensor([prompt], device=self.model.device) for prompt in self.prompts]
            return torch.cat([self.exact.full(prompt)[:, -1] for prompt in whole])

    def launched(self, steps: int) -> list[list[int]]:
        """Tokens of the next steps; the rows stay where they are."""
        return [
            [token for token in tokens if token is not None] for tokens in self.kernel.launch(self.fed, steps)
        ]

    def advance(self, tokens: Sequence[int]) -> None:
        """Feed the rows these tokens next."""
        self.fed = [row for row in advanced(self.fed, tokens) if row is not None]


def random_prompts(config: ModelConfig, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, the same every time."""
    generator = random.Random(5)
    return [[generator.randrange(5, config.vocab_size) for _ in range(size)] for size in lengths]


def deal(
    config: ModelConfig, lengths: Sequence[int], generator: random.Random
) -> tuple[dict[KVGroup, int], list[dict[KVGroup, list[int]]]]:
    """Block counts, and a table for each sequence, of blocks scattered at random."""
    per = [blocks_for(length) for length in lengths]
    groups = [group for group in KVGroup if config.layers_in(group)]
    free = {group: generator.sample(range(sum(per)), sum(per)) for group in groups}
    tables = [{group: [free[group].pop() for _ in range(count)] for group in groups} for count in per]
    return {group: sum(per) for group in groups}, tables


def error(ours: Tensor, right: Tensor) -> float:
    """The norm of the difference over the norm of what is right."""
    return float((ours.double() - right.double()).norm() / right.double().norm())


def logit_errors(bench: ModelBench) -> tuple[float, float]:
    """How far logits are from float32's, relative: the kernel's, and PyTorch's in bfloat16."""
    ours, theirs, exact = bench.kernel_logits(), bench.model_logits(), bench.exact_logits()
    return error(ours, exact), error(theirs, exact)


def noise_ratio(bench: ModelBench) -> float:
    """How far the kernel's logits are from float32's, in PyTorch's own distance in bfloat16.

    At most NOISE.
    """
    ours, theirs = logit_errors(bench)
    return ours / theirs


def parting_ratio(bench: ModelBench, launches: int = 2, steps: int = 16) -> float:
    """By how much the model would rather have had another token than the kernel's, in its own noise.

    At most 1. The model follows the kernel's tokens. Its noise is how far any logit is from float32's, four
    times: the largest and the token's are each off by as much as either side's roundings make them.
    """
    noise = 4 * float((bench.model_logits() - bench.exact_logits()).abs().max())
    largest = 0.0
    for _ in range(launches):
        made = bench.launched(steps)
        if len(made) != steps or any(len(tokens) != len(bench.fed) for tokens in made):
            return math.inf
        for tokens in made:
            logits = bench.model_logits()
            taken = torch.tensor(tokens, device=logits.device)[:, None]
            margins = logits.max(1).values - logits.gather(1, taken)[:, 0]
            if not torch.isfinite(margins).all():
                return math.inf
            largest = max(largest, float(margins.max()))
            bench.advance(tokens)
    return largest / noise
