"""Small models with sequences in a paged cache: what interpreters of plans are tried on.

The oracle is tried with them, and the kernel against the oracle: by tests, and by users on their own machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from headrace.model.batch import Span
from headrace.model.config import DenseMLP, KVGroup, LayerConfig, ModelConfig, MoEMLP, Norm, Rope, RopeScaling
from headrace.model.constraint import Mask
from headrace.model.kv import BLOCK_TOKENS, NO_BLOCK, KVCache, blocks_for, first_visible_block
from headrace.model.sampler import Sampled
from headrace.model.sampling import SamplingParams
from headrace.model.synthetic import synthetic_model
from headrace.model.transformer import Model
from headrace.step.oracle.arithmetic import Rounding
from headrace.step.oracle.machine import Oracle
from headrace.step.oracle.order import Order
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.weights import WeightPages
from headrace.step.pack import pack_model
from headrace.step.plan import Plan
from headrace.step.planner import build_plan

VOCABULARY = 300  # not a multiple of 8: the last tile of the head is padded
WINDOW = 70
GREEDY = SamplingParams(temperature=0)


def north(moe: MoEMLP | None = None, norm: Norm = Norm.RMS, window: int = WINDOW) -> ModelConfig:
    """North's shape, scaled down: a dense first layer, a sliding one, one without positions."""
    routed = moe or MoEMLP(width=32, experts=6, top_k=2)
    return ModelConfig(
        family="cohere2_moe",
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        layers=(
            LayerConfig(window=None, rope=Rope.INTERLEAVED, mlp=DenseMLP(width=64)),
            LayerConfig(window=window, rope=Rope.INTERLEAVED, mlp=routed),
            LayerConfig(window=None, rope=Rope.NONE, mlp=routed),
        ),
        parallel_block=True,
        norm=norm,
        norm_eps=1e-6,
        rope_theta=50000.0,
        max_positions=4096,
        tied_head=False,  # with random weights a tied head only ever repeats the last token
        logit_scale=0.5,
    )


def llama(heads: int = 6, kv_heads: int = 3, head_dim: int = 64, *, tied_head: bool = False) -> ModelConfig:
    """Llama's shape, scaled down: sequential blocks, rotary pairs half a head apart at stretched frequencies.

    One layer's feed-forward is wider than a kernel has registers for.
    """
    return ModelConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(
            LayerConfig(window=None, rope=Rope.HALF_SPLIT, mlp=DenseMLP(width=width)) for width in (160, 4608)
        ),
        parallel_block=False,
        norm=Norm.RMS,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        ),
        max_positions=4096,
        tied_head=tied_head,
    )


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """The same object every time, so that a test can change its weights, for a config of its own."""
    return _model(config, dtype)


@cache
def _model(config: ModelConfig, dtype: torch.dtype) -> Model:
    return synthetic_model(config, seed=3, dtype=dtype)


@dataclass
class History:
    """A sequence whose KV, but for its last token's, is in the cache."""

    tokens: list[int]
    tables: dict[KVGroup, list[int]]

    def row(
        self,
        slot: int,
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        allowed: Mask | None = None,
    ) -> LaunchRow:
        """Its last token as a row; the second half of the tokens counts as output."""
        at = len(self.tokens) - 1
        return LaunchRow(
            slot=slot,
            token=self.tokens[at],
            position=at,
            tables=self.tables,
            params=params,
            seed=seed,
            prompt=self.tokens[: at // 2],
            output=self.tokens[at // 2 :],
            allowed=allowed,
        )


@dataclass
class World:
    """A model with sequences of given lengths, all in one cache whose blocks are dealt out at random.

    `cache` is the model's. `poisoned` makes a copy for an oracle, in which all that no token was written to
    is NaN.
    """

    config: ModelConfig
    lengths: Sequence[int]
    room: int = 160  # tokens that a sequence may grow by
    dtype: torch.dtype = torch.float32
    seed: int = 0
    model: Model = field(init=False)
    cache: KVCache = field(init=False)
    sequences: list[History] = field(init=False)

    def __post_init__(self) -> None:
        self.model = model_of(self.config, self.dtype)
        generator = random.Random(self.seed)
        per = [blocks_for(length + self.room) for length in self.lengths]
        groups = [group for group in KVGroup if self.config.layers_in(group)]
        blocks = {group: sum(per) + 3 for group in groups}
        self.cache = KVCache(self.config, blocks, dtype=self.dtype)
        free = {group: generator.sample(range(blocks[group]), blocks[group]) for group in groups}
        self.sequences = []
        for length, count in zip(self.lengths, per, strict=True):
            tables = {group: [free[group].pop() for _ in range(count)] for group in groups}
            tokens = [generator.randrange(self.config.vocab_size) for _ in range(length)]
            if length > 1:
                self.fill(tokens[:-1], tables)
            self.sequences.append(History(tokens, tables))
        for sequence in self.sequences:
            self._give_back(sequence)

    def fill(self, tokens: list[int], tables: dict[KVGroup, list[int]]) -> None:
        """Put the keys and values of a sequence's past into the cache."""
        self.model([Span(tokens, 0, tables)], self.cache)

    def _give_back(self, sequence: History) -> None:
        """Sliding blocks that have left the window are gone, as in the engine."""
        if (table := sequence.tables.get(KVGroup.SLIDING)) is not None:
            gone = first_visible_block(len(sequence.tokens) - 1, self.config.window)
            table[:gone] = [NO_BLOCK] * gone

    def poisoned(self) -> KVCache:
        copy = KVCache(self.config, self.cache.blocks, dtype=self.dtype)
        for layer, described in enumerate(self.config.layers):
            copy.pages[layer].fill_(math.nan)
            for sequence in self.sequences:
                end = len(sequence.tokens) - 1
                table = sequence.tables[described.group]
                live = [index for index in range(blocks_for(end)) if table[index] != NO_BLOCK]
                full = torch.tensor([table[index] for index in live if (index + 1) * BLOCK_TOKENS <= end])
                if len(full):
                    copy.pages[layer][full] = self.cache.pages[layer][full]
                if count := end % BLOCK_TOKENS:
                    last = torch.tensor([table[end // BLOCK_TOKENS]])
                    k, v = self.cache.read(layer, last)
                    copy.write(layer, last.expand(count), torch.arange(count), k[:count], v[:count])
        return copy

    def oracle(
        self, *, rows: int, sms: int, order: Order | None = None, rounding: Rounding | None = None
    ) -> Oracle:
        plan = plan_of(self.config, rows, sms)
        return self.oracle_of(plan, order=order, rounding=rounding)

    def oracle_of(
        self, plan: Plan, *, order: Order | None = None, rounding: Rounding | None = None
    ) -> Oracle:
        exact = Rounding.FLOAT32 if self.dtype == torch.float32 else Rounding.BFLOAT16
        return Oracle(plan, weights_of(self.model), self.poisoned(), rounding=rounding or exact, order=order)

    def rows(self, params: SamplingParams = GREEDY) -> list[LaunchRow]:
        """A row for each sequence."""
        return [sequence.row(slot, params) for slot, sequence in enumerate(self.sequences)]

    def logits(self, rows: Sequence[LaunchRow]) -> Tensor:
        """What the PyTorch model says of these rows; writes their KV into its own cache."""
        spans = [Span([row.token], row.position, row.tables) for row in rows]
        return self.model.logits(self.model(spans, self.cache))

    def greedy(self, rows: Sequence[LaunchRow], steps: int) -> list[list[int]]:
        """The PyTorch model's continuation of each row."""
        made: list[list[int]] = [[] for _ in rows]
        for step in range(steps):
            fed = [
                replace(row, token=tokens[-1] if tokens else row.token, position=row.position + step)
                for row, tokens in zip(rows, made, strict=True)
            ]
            for tokens, token in zip(made, self.logits(fed).argmax(-1).tolist(), strict=True):
                tokens.append(token)
        return made


@cache
def weights_of(model: Model) -> WeightPages:
    packed = pack_model(model, device="cpu", dtype=model.dtype)
    return WeightPages(packed.data, packed.norms)


@cache
def plan_of(config: ModelConfig, rows: int, sms: int) -> Plan:
    return build_plan(config, rows=rows, sms=sms)


def tokens_of(results: Sequence[Sampled | None]) -> list[int | None]:
    return [None if result is None else result.token for result in results]
