"""The kernel on a Hopper GPU against the PyTorch model: as near to float32 as PyTorch's own bfloat16 is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.kernel.check.against_model import (
    MICRO_SETTINGS,
    NOISE,
    NORTH,
    NORTHS_WIDTHS,
    WIDE_SETTINGS,
    ModelBench,
    logit_errors,
    noise_ratio,
    parting_ratio,
    random_prompts,
)
from headrace.kernel.check.decided import OWN, SMALL, decided_bench
from headrace.model.checkpoint import load_model
from headrace.model.transformer import Model
from tests.recording import RecordCheck

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

MICRO = Path(__file__).parents[2] / "models" / "north-micro"


def micro() -> Model:
    return load_model(MICRO, device="cuda", dtype=torch.bfloat16, progress=None)


def bench(model: Model, lengths: list[int], rows: int) -> ModelBench:
    return ModelBench(model, random_prompts(model.config, lengths), rows)


@pytest.mark.parametrize(("lengths", "rows"), MICRO_SETTINGS)
def test_logits_of_north_micro(lengths: list[int], rows: int, record_check: RecordCheck) -> None:
    ratio = noise_ratio(bench(micro(), lengths, rows))
    record_check(f"logits of north-micro, {rows} rows, in PyTorch's own error", ratio, NOISE)


@pytest.mark.parametrize(("lengths", "rows"), WIDE_SETTINGS)
def test_logits_at_norths_widths(lengths: list[int], rows: int, record_check: RecordCheck) -> None:
    """Five of North's layers: the dense one, three with a window, one without positions."""
    ratio = noise_ratio(decided_bench(NORTHS_WIDTHS, lengths, rows))
    record_check(f"logits at North's widths, {rows} rows, in PyTorch's own error", ratio, OWN)


def test_logits_of_the_whole_of_north(record_check: RecordCheck) -> None:
    """All 49 layers. The weights are there once, in pages; in float32 they are one layer at a time."""
    ours, theirs = logit_errors(decided_bench(NORTH, WIDE_SETTINGS[1][0], 8))
    record_check("PyTorch's own error in the logits of all of North's layers, 8 rows", theirs, SMALL)
    record_check("logits of all of North's layers, 8 rows, in PyTorch's own error", ours / theirs, OWN)


@pytest.mark.parametrize(("lengths", "rows"), MICRO_SETTINGS)
def test_greedy_tokens_of_north_micro_up_to_a_near_tie(
    lengths: list[int], rows: int, record_check: RecordCheck
) -> None:
    """The model follows the kernel's tokens, and would have taken each itself but for rounding."""
    ratio = parting_ratio(bench(micro(), lengths, rows))
    record_check(f"32 tokens of north-micro, {rows} rows, margin in PyTorch's own noise", ratio, 1)
