"""The plan of a step, executed, gives what the PyTorch model gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.model.config import KVGroup, ModelConfig, MoEMLP, Norm
from headrace.model.kv import BLOCK_TOKENS
from headrace.step.isa import Buffer
from headrace.step.oracle.arithmetic import Rounding, bfloat16
from headrace.step.oracle.order import RandomOrder
from headrace.step.oracle.past import NoisyPast, edges
from headrace.step.oracle.rows import LaunchRow
from tests.step.oracle.setting import WINDOW, World, llama, north, tokens_of, weights_of

# Around the edges of pages, of chunks and of the window; a lone first token.
LENGTHS = (1, 2, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 127, 128, 129, 130, 134, 193, 300, 40)

SHARED = MoEMLP(width=32, experts=4, top_k=2, normalize=True, shared_experts=1)
MODELS = {
    "north": north(),
    "llama": llama(),
    "shared experts, averaged": north(SHARED),
    "shared experts, added": north(replace(SHARED, shared_sum=True), norm=Norm.LAYER),
    "all experts active": north(MoEMLP(width=32, experts=3, top_k=3)),
}


def close(found: npt.NDArray[np.float32], wanted: torch.Tensor) -> None:
    """Equal but for the order of float32 sums."""
    np.testing.assert_allclose(found, wanted.numpy(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sms", [1, 2, 3, 7])
@pytest.mark.parametrize("capacity", [1, 2, 4, 8, 16])
def test_ragged_rows(capacity: int, sms: int) -> None:
    world = World(north(), LENGTHS[-capacity:] if capacity < 16 else LENGTHS, seed=capacity)
    rows = world.rows()
    order = RandomOrder(seed=capacity * 10 + sms) if (capacity + sms) % 2 else None
    oracle = world.oracle(rows=capacity, sms=sms, order=order)
    steps = 2
    made = [tokens_of(results) for results in oracle.launch(rows, steps)]
    wanted = world.greedy(rows, steps)
    assert [list(tokens) for tokens in zip(*made, strict=True)] == wanted
    last = [
        replace(row, token=tokens[-2], position=row.position + steps - 1)
        for row, tokens in zip(rows, wanted, strict=True)
    ]
    close(oracle.logits()[: len(rows)], world.logits(last))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str) -> None:
    world = World(MODELS[name], [90, 64, 3])
    rows = world.rows()
    oracle = world.oracle(rows=4, sms=3, order=RandomOrder(seed=1))
    made = [tokens_of(results) for results in oracle.launch(rows, 4)]
    assert [list(tokens) for tokens in zip(*made, strict=True)] == world.greedy(rows, 4)


def routed_alike() -> ModelConfig:
    """A model whose router cannot tell experts apart: ties, which go to the lowest index."""
    return north(MoEMLP(width=32, experts=5, top_k=1))


def test_all_rows_to_one_expert() -> None:
    world = World(routed_alike(), [70, 65, 30, 8])
    for layer in (1, 2):
        world.model.get_parameter(f"blocks.{layer}.mlp.router.weight").zero_()
    weights_of.cache_clear()
    oracle = world.oracle(rows=4, sms=3)
    rows = world.rows()
    list(oracle.launch(rows, 1))
    close(oracle.logits()[:4], world.logits(rows))
    assert not np.isnan(oracle.buffer(Buffer.HIDDEN)[:4]).all()
    assert np.isnan(oracle.buffer(Buffer.HIDDEN)[8:]).all()  # tiles beyond the dense layer's and one expert's


def test_128_tokens_across_the_window() -> None:
    world = World(north(), [WINDOW - 20])
    row = world.rows()[0]
    oracle = world.oracle(rows=1, sms=2)
    made: list[int] = []
    while len(made) < 128:
        token = made[-1] if made else row.token
        fed = replace(row, token=token, position=row.position + len(made))
        for results in oracle.launch([fed], 16):
            assert results[0] is not None
            made.append(results[0].token)
    assert made == world.greedy([row], 128)[0]
    assert len(set(made)) > 10


def test_rows_of_one_sequence_see_each_other() -> None:
    """A draft being verified: each row sees the keys that the rows before it write in the same step."""
    world = World(north(), [126, 50])
    first, other = world.rows()
    draft = [replace(first, token=7 * n, position=first.position + n) for n in range(5)]  # over a page's edge
    rows: list[LaunchRow | None] = [draft[3], None, other, *draft[:3], draft[4]]
    present = [row for row in rows if row is not None]
    oracle = world.oracle(rows=8, sms=3, order=RandomOrder(seed=5))
    [results] = oracle.launch(rows, 1)
    wanted = world.logits(sorted(present, key=lambda row: (row.slot, row.position)))
    for index, row in enumerate(rows):
        if row is None:
            assert results[index] is None
            continue
        place = sorted(present, key=lambda one: (one.slot, one.position)).index(row)
        close(oracle.logits()[index], wanted[place])
    with pytest.raises(ValueError, match="one step a launch"):
        next(oracle.launch(rows, 2))


def test_a_context_of_262144_tokens_beside_one_of_two() -> None:
    """Tokens that would be missed are there: see `headrace.step.oracle.past`."""
    world = NoisyPast(north(window=4096), [2, 262_144])
    rows = world.rows()
    oracle = world.oracle(rows=2, sms=3)
    list(oracle.launch(rows, 1))
    right = world.logits(rows).numpy()
    np.testing.assert_allclose(oracle.logits(), right, atol=2e-4)  # sums of so many
    # One token of that many, at the beginning of the middle chunk.
    middle = edges(262_143, 0)[4]
    block = torch.tensor([world.sequences[1].tables[KVGroup.FULL][middle // BLOCK_TOKENS]])
    k, v = world.cache.read(0, block)
    at = torch.tensor([middle % BLOCK_TOKENS])
    world.cache.write(0, block, at, k[at], 0 * v[at])
    assert np.abs(world.logits(rows)[1].numpy() - right[1]).max() > 0.01


def test_bfloat16_rounds_where_buffers_do() -> None:
    lengths = [90, 64, 3]
    world = World(north(), lengths, dtype=torch.bfloat16)
    rows = world.rows()
    exact = world.oracle(rows=4, sms=3, rounding=Rounding.FLOAT32)
    rounded = world.oracle(rows=4, sms=3)
    for oracle in (exact, rounded):
        list(oracle.launch(rows, 1))
    for buffer in (Buffer.X, Buffer.QKV, Buffer.ATTENTION_OUT, Buffer.HIDDEN):
        values = rounded.buffer(buffer)[:, :3]
        np.testing.assert_array_equal(values, bfloat16(values))
        assert not np.array_equal(exact.buffer(buffer)[:, :3], bfloat16(exact.buffer(buffer)[:, :3]))
    for buffer in (Buffer.ROUTER_LOGITS, Buffer.PARTIALS):  # these stay float32
        values = rounded.buffer(buffer)
        assert not np.array_equal(values, bfloat16(values), equal_nan=True)
    wanted = world.logits(rows).numpy()
    scale = wanted.std()
    error = np.abs(rounded.logits()[:3] - exact.logits()[:3]).max()
    assert 0 < error < 0.05 * scale
    assert np.abs(rounded.logits()[:3] - wanted).max() < 0.08 * scale


def test_bfloat16_is_to_nearest_even() -> None:
    values = torch.randn(1000).numpy()
    values[:4] = [0.0, -0.0, np.inf, -np.inf]
    np.testing.assert_array_equal(bfloat16(values), torch.from_numpy(values).bfloat16().float().numpy())
    assert np.isnan(bfloat16(np.array([np.nan], dtype=np.float32)))[0]
