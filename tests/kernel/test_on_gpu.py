"""The kernel on a Hopper GPU against the oracle, buffer by buffer; and what must not change its bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernel.launcher import Launcher, WatchdogError
from headrace.model.kv import KVCache
from headrace.step.isa import Buffer, Field, Opcode
from headrace.step.oracle.machine import Oracle
from headrace.step.oracle.rows import LaunchRow
from headrace.step.pack import pack_model
from headrace.step.plan import Plan
from headrace.step.planner import build_plan
from tests.step.oracle.setting import World, north, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

COMPARED = (
    Buffer.X,
    Buffer.QKV,
    Buffer.PARTIALS,
    Buffer.ATTENTION_OUT,
    Buffer.ROUTER_LOGITS,
    Buffer.HIDDEN,
)
BOUND = 0.01  # relative error of a buffer: a few roundings to bfloat16, through three layers
MARGIN = 0.03  # between the two largest logits, in their standard deviations: nearer, roundings decide

# Lengths of the sequences: pages' edges and the window's; capacity; which place of the launch stays empty.
SETTINGS: list[tuple[list[int], int, int | None]] = [
    ([130], 1, None),
    ([64, 65], 2, None),
    ([1, 64, 200], 4, 1),
    ([130, 1, 65, 70, 64, 3, 127], 8, None),
    ([1, 64, 65, 130, 63, 71, 5, 128, 129, 100], 16, 3),
]
Rows = Sequence[LaunchRow | None]


class Bench:
    """A small model with sequences of given lengths, for the oracle and for kernels on the GPU."""

    def __init__(self, lengths: list[int], rows: int, hole: int | None = None) -> None:
        self.world = World(north(), lengths, dtype=torch.bfloat16)
        self.plan = build_plan(self.world.config, rows=rows, sms=132)
        self.rows: list[LaunchRow | None] = list(self.world.rows())
        if hole is not None:
            self.rows.insert(hole, None)
        self.live = [index for index, row in enumerate(self.rows) if row is not None]

    def kernel(self, *, plan: Plan | None = None, strict: bool = False) -> Launcher:
        """A kernel with KV pages of its own, in which all that no token was written to is NaN."""
        packed = pack_model(self.world.model, device="cuda", dtype=torch.bfloat16)
        cache = KVCache(self.world.config, self.world.cache.blocks, dtype=torch.bfloat16, device="cuda")
        for pages, poisoned in zip(cache.pages, self.world.poisoned().pages, strict=True):
            pages.copy_(poisoned)
        blocks = max(len(table) for one in self.world.sequences for table in one.tables.values())
        return Launcher(plan or self.plan, packed, cache, table_blocks=blocks, strict=strict, timeout=0.5)

    def logits(self, kernel: Launcher) -> Tensor:
        """Of the live rows: [rows, vocabulary]."""
        tiles = kernel.buffer(Buffer.LOGITS).permute(1, 0, 2)
        return tiles.reshape(self.plan.sizes.rows, -1)[self.live, : self.plan.sizes.vocabulary].cpu()


def error(ours: Tensor, right: Tensor) -> float:
    """Relative, over what the oracle has written; NaN where we have not."""
    written = ~torch.isnan(right)
    return float((ours[written] - right[written]).norm() / right[written].norm())


def buffers_agree(bench: Bench, kernel: Launcher, oracle: Oracle) -> None:
    for buffer in COMPARED:
        right = torch.from_numpy(np.asarray(oracle.buffer(buffer), dtype=np.float32))
        ours = kernel.buffer(buffer).float().cpu()
        if buffer is Buffer.PARTIALS:
            ours, right = ours[bench.live], right[bench.live]
        else:
            ours, right = ours[:, bench.live], right[:, bench.live]
        assert error(ours, right) < BOUND, buffer.name
    assert error(bench.logits(kernel), torch.from_numpy(oracle.logits()[bench.live])) < BOUND


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_a_step_leaves_what_the_oracle_leaves(
    lengths: list[int], rows: int, hole: int | None, strict: bool
) -> None:
    bench = Bench(lengths, rows, hole)
    oracle = bench.world.oracle_of(bench.plan)
    kernel = bench.kernel(strict=strict)
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    buffers_agree(bench, kernel, oracle)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_tokens_are_the_oracles_up_to_a_near_tie(lengths: list[int], rows: int, hole: int | None) -> None:
    bench = Bench(lengths, rows, hole)
    oracle, steps = bench.world.oracle_of(bench.plan), 6
    made = list(bench.kernel().launch(bench.rows, steps))
    assert len(made) == steps
    fed: Rows = bench.rows
    following = set(bench.live)
    for tokens in made:
        (sampled,) = oracle.launch(fed, 1)
        right, logits = tokens_of(sampled), np.sort(oracle.logits(), axis=1)
        for index in list(following):
            if tokens[index] != right[index]:
                margin = (logits[index, -1] - logits[index, -2]) / logits[index].std()
                assert margin < MARGIN, f"row {index}: {tokens[index]} instead of {right[index]}"
                following.remove(index)
        fed = advanced(fed, right)
    assert following


def advanced(rows: Rows, tokens: Sequence[int | None]) -> list[LaunchRow | None]:
    """The rows one step on."""
    return [
        None if row is None or token is None else replace(row, token=token, position=row.position + 1)
        for row, token in zip(rows, tokens, strict=True)
    ]


def run(bench: Bench, kernel: Launcher, rows: Rows, steps: int, *, at_once: bool) -> list[list[int | None]]:
    if at_once:
        return list(kernel.launch(rows, steps))
    made = []
    for _ in range(steps):
        kernel.poison()
        (tokens,) = kernel.launch(rows, 1)
        made.append(tokens)
        rows = advanced(rows, tokens)
    return made


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:])
def test_bits_do_not_depend_on_the_launch(lengths: list[int], rows: int, hole: int | None) -> None:
    """Sixteen steps at once, one by one with poisoned buffers in between, and by the book: all the same."""
    bench = Bench(lengths, rows, hole)
    first = bench.kernel()
    tokens = run(bench, first, bench.rows, 16, at_once=True)
    for strict, at_once in ((False, False), (True, True), (False, True)):
        other = bench.kernel(strict=strict)
        assert run(bench, other, bench.rows, 16, at_once=at_once) == tokens
        assert torch.equal(bench.logits(other), bench.logits(first))


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:])
def test_a_row_alone_has_the_same_bits(lengths: list[int], rows: int, hole: int | None) -> None:
    bench = Bench(lengths, rows, hole)
    together, alone = bench.kernel(), bench.kernel()
    list(together.launch(bench.rows, 4))
    last = bench.live[-1]
    list(alone.launch([row if index == last else None for index, row in enumerate(bench.rows)], 4))
    assert torch.equal(bench.logits(alone)[-1], bench.logits(together)[-1])


def test_a_row_has_the_same_bits_at_every_capacity() -> None:
    logits = []
    for rows in (1, 4, 16):
        bench = Bench([130], rows)
        kernel = bench.kernel()
        list(kernel.launch(bench.rows, 4))
        logits.append(bench.logits(kernel))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_rows_of_one_sequence_see_one_another() -> None:
    """The last tokens of a sequence as rows of one step give what the oracle gives."""
    bench = Bench([70], 4)
    (only,) = bench.world.rows()
    tokens = bench.world.sequences[0].tokens
    bench.rows = [replace(only, token=tokens[at], position=at) for at in range(66, 70)]
    bench.live = list(range(4))
    oracle = bench.world.oracle_of(bench.plan)
    kernel = bench.kernel()
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    buffers_agree(bench, kernel, oracle)


def test_limits_and_stop_tokens_end_rows_and_launches() -> None:
    bench = Bench([130, 64], 2)
    free = list(bench.kernel().launch(bench.rows, 8))
    third = free[2][1]
    assert third is not None
    rows = [
        replace(row, max_tokens=5) if index == 0 else replace(row, stop_token_ids=frozenset({third}))
        for index, row in enumerate(bench.world.rows())
    ]
    ends = next(step for step, made in enumerate(free) if made[1] == third)
    made = list(bench.kernel().launch(rows, 16))
    assert len(made) == max(5, ends + 1)
    assert [tokens[0] for tokens in made[:5]] == [tokens[0] for tokens in free[:5]]
    assert all(tokens[1] is None for tokens in made[ends + 1 :])


def test_the_stop_flag_ends_a_launch_early_and_the_next_goes_on() -> None:
    bench = Bench([130], 1)
    whole = [tokens[0] for tokens in bench.kernel().launch(bench.rows, 16)]
    kernel = bench.kernel()
    made = [tokens[0] for tokens in kernel.launch(bench.rows, 16, lambda: True)]
    assert 1 <= len(made) <= 16
    assert made == whole[: len(made)]
    if len(made) < 16:
        (row,) = bench.world.rows()
        assert made[-1] is not None
        following = replace(row, token=made[-1], position=row.position + len(made))
        (tokens,) = kernel.launch([following], 1)
        assert tokens[0] == whole[len(made)]


def test_a_broken_counter_ends_in_a_named_error_and_the_kernel_can_go_on() -> None:
    bench = Bench([130], 1)
    words = bench.plan.descriptors.copy()
    norms = (words[..., Field.OPCODE] == Opcode.O_PROJ) & (words[..., Field.LAYER] == 1)
    sm, task = (int(part) for part in np.argwhere(norms)[0])
    words[sm, task, Field.WAIT_ARRIVALS] += 1
    kernel = bench.kernel(plan=replace(bench.plan, descriptors=words))
    with pytest.raises(WatchdogError, match=r"\[1\]"):
        list(kernel.launch(bench.rows, 1))
    assert math.isfinite(float(torch.ones(1, device="cuda")[0]))  # the GPU is still there
