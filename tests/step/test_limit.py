"""What a step must read, against counts of the model's parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.model.config import KVGroup, MoEMLP
from headrace.model.memory import active_parameter_count, kv_bytes_per_token
from headrace.model.presets import PRESETS
from headrace.step.isa import Opcode
from headrace.step.limit import (
    StepBytes,
    bytes_by_operation,
    expert_bytes,
    kv_bytes,
    step_bytes,
    uniform_experts,
)

NORTH = PRESETS["north-mini-code"]
ROUTED = [layer.mlp for layer in NORTH.layers if isinstance(layer.mlp, MoEMLP)]


def test_one_row_reads_the_active_parameters() -> None:
    read = step_bytes(NORTH, [0], experts=sum(mlp.top_k for mlp in ROUTED))
    norms = NORTH.hidden_size * (NORTH.num_layers + 1)  # in float32, so twice as many bytes
    own_embedding = NORTH.hidden_size
    assert read.total == 2 * (active_parameter_count(NORTH) + norms + own_embedding)


def test_an_untied_embedding_is_not_read_whole() -> None:
    untied = replace(NORTH, tied_head=False)
    assert step_bytes(untied, [5, 7], 100).weights == step_bytes(NORTH, [5, 7], 100).weights


def test_keys_and_values_before_the_row_within_its_window() -> None:
    full, sliding = (kv_bytes_per_token(NORTH, group, torch.bfloat16) for group in KVGroup)
    assert NORTH.window == 4096
    assert kv_bytes(NORTH, [100]) == 100 * (full + sliding)
    assert kv_bytes(NORTH, [8191, 100]) == (8191 + 100) * full + (4095 + 100) * sliding


@pytest.mark.parametrize("name", ["north-mini-code", "llama-3.2-1b", "smollm2-135m"])
def test_operations_read_all_but_the_norms(name: str) -> None:
    config = PRESETS[name]
    norms = 4 * config.hidden_size * (config.num_layers * (1 if config.parallel_block else 2) + 1)
    experts = 500 if name == "north-mini-code" else 0
    read = bytes_by_operation(config, [100, 8191], experts)
    assert sum(read.values()) == pytest.approx(
        step_bytes(config, [100, 8191], experts).total - norms, rel=1e-12
    )


def test_what_each_operation_of_north_reads() -> None:
    read = bytes_by_operation(NORTH, [100, 8191], experts=500)
    assert read[Opcode.QKV_PROJ] == 49 * (32 + 4 + 4) * 128 * 2048 * 2
    assert read[Opcode.O_PROJ] == 49 * 2048 * 4096 * 2
    assert read[Opcode.EXPERT_UP] == pytest.approx(500 * 2 * 768 * 2048 * 2)
    assert read[Opcode.EXPERT_DOWN] == pytest.approx(500 * 768 * 2048 * 2)
    assert read[Opcode.ROUTER] == 48 * 128 * 2048 * 2
    assert read[Opcode.EMBED] == 2 * 2048 * 2
    assert read[Opcode.LM_HEAD] == NORTH.vocab_size * 2048 * 2


def test_experts_of_uniform_routing() -> None:
    assert uniform_experts(NORTH, 1) == pytest.approx(8 * 48)
    assert uniform_experts(NORTH, 2) == pytest.approx((8 + 8 * 120 / 128) * 48)
    assert expert_bytes(NORTH) == 3 * 768 * 2048 * 2


def test_a_sum_over_unequal_experts_is_refused() -> None:
    small = replace(NORTH.layers[1], mlp=replace(ROUTED[0], width=384))
    with pytest.raises(ValueError, match="different sizes"):
        expert_bytes(replace(NORTH, layers=(*NORTH.layers, small)))


def test_the_share_of_a_bandwidth() -> None:
    assert StepBytes(2e9, 1e9, 1e9).share(seconds=0.002, bandwidth=4e12) == pytest.approx(0.5)
