"""Models besides `headrace.step.oracle.world`'s own, and the PyTorch path's word on how rows are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from headrace.model.config import DenseMLP, LayerConfig, ModelConfig, Rope
from headrace.model.sampler import Sampled, SampleRow, sample
from headrace.step.oracle.rows import LaunchRow
from headrace.step.oracle.world import GREEDY as GREEDY
from headrace.step.oracle.world import VOCABULARY as VOCABULARY
from headrace.step.oracle.world import WINDOW as WINDOW
from headrace.step.oracle.world import History as History
from headrace.step.oracle.world import World as World
from headrace.step.oracle.world import model_of as model_of
from headrace.step.oracle.world import north as north
from headrace.step.oracle.world import plan_of as plan_of
from headrace.step.oracle.world import tokens_of as tokens_of
from headrace.step.oracle.world import weights_of as weights_of


def llama() -> ModelConfig:
    """Sequential blocks, rotary pairs that are half a head apart, a head of 3 x 32 columns."""
    layer = LayerConfig(window=None, rope=Rope.HALF_SPLIT, mlp=DenseMLP(width=96))
    return replace(
        north(), family="llama", parallel_block=False, hidden_size=96, layers=(layer, layer), tied_head=True
    )


def sequential() -> ModelConfig:
    """North's layers in sequential blocks: a plan in which fewer waits follow from others."""
    return replace(north(), parallel_block=False)


def expected(logits: Tensor, rows: Sequence[LaunchRow]) -> list[Sampled]:
    """What the sampler of the PyTorch path makes of these logits."""
    return sample(
        logits,
        [
            SampleRow(
                params=row.params,
                seed=row.seed,
                position=row.position + 1,
                prompt=row.prompt,
                output=row.output,
                mask=row.allowed,
            )
            for row in rows
        ],
    )
