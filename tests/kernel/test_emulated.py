"""The whole kernel, run thread by thread on the host, against the oracle; what must not change its bits.

As `tests.kernel.test_on_gpu` on a GPU, and within the same bounds; what it leaves open is in
`tests.kernel.emulated`. Needs a C++ compiler.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.kernel.check.against_oracle import (
    BOUND,
    COMPARED,
    MARGIN,
    SETTINGS,
    Bench,
    buffer_errors,
    changed_by_capacity,
    changed_by_launches,
    changed_by_others,
    parting_margin,
    step_errors,
    worst,
)
from headrace.kernel.check.kernels import Tokens
from headrace.kernel.check.stress import changed_under_stress, hops, outcome
from headrace.model.sampling import SamplingParams
from headrace.step import division
from headrace.step.isa import Buffer, Field, Opcode
from headrace.step.machine import PACE_PLACES
from tests.kernel.emulated import COMPILER, EmulationError, Spoilt
from tests.kernel.emulated.decode import EmulatedKernel
from tests.kernel.emulated.libraries import SMS, Libraries

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SEEDS = (0, 1, 6)  # each another order of threads and copies: see scheduler.h

# Each is seen in the buffers, or the launch does not come to its end.
BREAKS: dict[str, Spoilt] = {
    "an expert's part is taken off": (
        "ops/expert_down.h",
        "sum.x += weight.x * v.x",
        "sum.x -= weight.x * v.x",
    ),
    "pages of attention are read before they land": (
        "ops/attention.h",
        "wait_barrier(c.s, &c.s.page_full",
        "if (false) wait_barrier(c.s, &c.s.page_full",
    ),
    "new tokens are another warp's": (
        "ops/attention.h",
        "if (token / FOUR % 2 != place.four()) continue;",
        "if (token / FOUR % 2 == place.four()) continue;",
    ),
    "a signal goes out before its data": ("publish.h", "      ptx::bulk_stores_done();\n", ""),
    "more pages under way than the ring has": (
        "ring.h",
        "MOST_IN_FLIGHT = RING - 1 - SKIPPED",
        "MOST_IN_FLIGHT = 2 * RING",
    ),
    "a task is handed over before its slot is filled": (
        "copier.h",
        "s.task_full[handed++ % isa::TASK_SLOTS]",
        "s.task_full[++handed % isa::TASK_SLOTS]",
    ),
    "experts of the layer before are chosen": (
        "helper.h",
        "if (!wait_counter_or_end(",
        "if (!routes && !wait_counter_or_end(",
    ),
    "sums are given back before they are read": (
        "gemm.h",
        """        Results results[MOST_HALVES];
#pragma unroll
        for (int half = 0; half < MOST_HALVES; half++) results[half] = added_up(c, turn, half);
        end_turn(c, turn);""",
        """        end_turn(c, turn);
        Results results[MOST_HALVES];
#pragma unroll
        for (int half = 0; half < MOST_HALVES; half++) results[half] = added_up(c, turn, half);""",
    ),
    "a member is not aligned": (
        "state.h",
        "alignas(16) float weight[MAX_ACTIVE]",
        "float weight[MAX_ACTIVE]",
    ),
}


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_a_step_leaves_what_the_oracle_leaves(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    errors = step_errors(libraries.bench(lengths, rows, hole))
    assert worst(errors) <= BOUND, errors


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:3])
def test_the_order_of_threads_and_copies_does_not_show(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    """After two steps every byte is the same."""
    left = []
    for seed in SEEDS:
        bench = libraries.bench(lengths, rows, hole, seed=seed)
        kernel = bench.kernel()
        tokens = list(kernel.launch(bench.rows, 2))
        left.append((tokens, [bytes_of(kernel.buffer(buffer)) for buffer in (*COMPARED, Buffer.LOGITS)]))
    assert all(one == left[0] for one in left[1:])


def bytes_of(buffer: torch.Tensor) -> bytes:
    return buffer.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[::2])
def test_tokens_are_the_oracles_up_to_a_near_tie(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    """Eight rows are left out: in their second step a row's second and third expert nearly tie."""
    assert parting_margin(libraries.bench(lengths, rows, hole, seed=1), steps=3) <= MARGIN


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:3])
def test_bits_do_not_depend_on_the_launch(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    """Steps at once, one by one with poisoned buffers in between, and by the book: all the same."""
    assert changed_by_launches(libraries.bench(lengths, rows, hole, seed=2), steps=3) == 0


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2::2])
def test_a_row_alone_has_the_same_bits(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    assert changed_by_others(libraries.bench(lengths, rows, hole), steps=2) == 0


def test_a_row_has_the_same_bits_at_every_capacity(libraries: Libraries) -> None:
    benches = [libraries.bench([130], rows, seed=rows) for rows in (1, 2, 4, 8, 16)]
    assert changed_by_capacity(benches, steps=2) == 0


def test_another_order_of_sums_at_one_capacity_is_seen(libraries: Libraries) -> None:
    """Right within the bounds, and not to the bit: both products of 16 rows in one sum."""
    words = "ptx::multiply_add(sums.value[0][{}], a.at(c, page, begin + i, 1)"
    other = ("gemm.h", words.format(1), words.format(0))
    assert worst(step_errors(libraries.bench([130], 16, spoilt=other))) <= BOUND
    assert changed_by_capacity([libraries.bench([130], 8), libraries.bench([130], 16, spoilt=other)], steps=2)


def test_rows_of_one_sequence_see_one_another(libraries: Libraries) -> None:
    """The last tokens of a sequence as rows of one step give what the oracle gives, whichever comes first."""
    bench = libraries.bench([70], 4)
    (only,) = bench.world.rows()
    tokens = bench.world.sequences[0].tokens
    bench.rows = [replace(only, token=tokens[at], position=at) for at in (69, 66, 67, 68)]
    bench.live = list(range(4))
    oracle, kernel = bench.oracle(), bench.kernel()
    list(oracle.launch(bench.rows, 1))
    list(kernel.launch(bench.rows, 1))
    assert worst(buffer_errors(bench, kernel, oracle)) <= BOUND


NOT_ALL_COUNT: Spoilt = ("pace.h", "if (lane == 0) ahead", "if (lane == 0 && blockIdx.x != 0) ahead")


@pytest.mark.parametrize(
    ("rows", "spoilt", "left"), [(2, None, SMS - 1), (16, None, SMS - 1), (16, NOT_ALL_COUNT, 0)]
)
def test_all_sms_count_at_every_place(
    libraries: Libraries, rows: int, spoilt: Spoilt | None, left: int
) -> None:
    """From a number that no place comes to, at the first count, to 0; then round and round."""
    bench = libraries.bench([130, 5], rows, spoilt=spoilt)
    kernel = bench.kernel()
    assert isinstance(kernel, EmulatedKernel)
    places = kernel.counters[len(kernel.plan.counters) :, 0]
    places.fill_(77)
    list(kernel.launch(bench.rows, 1))
    assert places.tolist() == [left] * PACE_PLACES


def test_a_broken_counter_ends_in_a_named_error(libraries: Libraries) -> None:
    bench = libraries.bench([130], 1)
    words = bench.plan.descriptors.copy()
    projections = (words[..., Field.OPCODE] == Opcode.O_PROJ) & (words[..., Field.LAYER] == 1)
    sm, task = (int(part) for part in np.argwhere(projections)[0])
    words[sm, task, Field.WAIT_ARRIVALS] += 1
    kernel = bench.kernel(plan=replace(bench.plan, descriptors=words))
    with pytest.raises(EmulationError, match=r"gave up: .* waited for .*\[1\]"):
        list(kernel.launch(bench.rows, 1))


def test_chunks_of_more_pages_than_the_ring_has(
    libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rows of tens of thousands of tokens have them: one group of warps skips laps of the ring."""
    monkeypatch.setattr(division, "CHUNK_BLOCKS", 12)
    chunks: Spoilt = ("isa.h", "CHUNK_BLOCKS = 2", "CHUNK_BLOCKS = 12")
    bench = libraries.bench([1600, 900], 2, spoilt=chunks)
    errors = step_errors(bench)
    assert worst(errors) <= BOUND, errors


# Only rows of more than half of all chunks show it.
LATE_CHUNKS_LOST: Spoilt = (
    "ops/attention_merge.h",
    "if (lane + n * isa::WARP >= chunks) continue",
    "if (n || lane >= chunks) continue",
)


@pytest.mark.parametrize(("length", "rows"), [(2100, 1), (4300, 2), (8190, 2)])
def test_rows_of_many_chunks(libraries: Libraries, length: int, rows: int) -> None:
    """17, 34 and all 64 of them, in the layers without a window."""
    errors = step_errors(libraries.bench([length], rows))
    assert worst(errors) <= BOUND, errors


def test_chunks_that_are_not_merged_are_seen(libraries: Libraries) -> None:
    assert worst(step_errors(libraries.bench([8190], 2, spoilt=LATE_CHUNKS_LOST))) > BOUND


@pytest.mark.parametrize(
    "spoilt", [None, BREAKS["a signal goes out before its data"]], ids=["right", "broken"]
)
def test_launches_that_are_repeated_come_to_the_same(libraries: Libraries, spoilt: Spoilt | None) -> None:
    """Poisoned in between, in another order each; and if a signal is too early, they do not."""
    whole = libraries.bench(*SETTINGS[2])
    right, changed = outcome(whole.kernel(), whole.plan, whole.rows, 1), 0
    for seed in SEEDS:
        bench = libraries.bench(*SETTINGS[2], seed=seed, spoilt=spoilt)
        changed += changed_under_stress(bench.kernel(), bench.plan, bench.rows, right, hops(bench.plan))
    assert changed == 0 if spoilt is None else changed > 0


def alternating(bench: Bench) -> list[list[Tokens]]:
    """Tokens of launches of two steps: largest logit, drawn, drawn after a search; and all three again."""
    kernel = bench.kernel()
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.9, top_k=9, top_p=0.8),
    ]
    launches = []
    for params in kinds * 2:
        rows = [row and replace(row, params=params, seed=5) for row in bench.rows]
        launches.append(list(kernel.launch(rows, 2)))
    return launches


def test_launches_that_search_for_borders_may_follow_others(libraries: Libraries) -> None:
    """Only they run SAMPLE_SELECT, so its counters count other steps than all the others do."""
    launches = alternating(libraries.bench(*SETTINGS[2], seed=1))
    assert launches[:3] == launches[3:]
    assert len({str(tokens) for tokens in launches[:3]}) == 3


@pytest.mark.parametrize("header", ["ops/sample_select.h", "ops/sample_pick.h"])
def test_searches_that_count_all_steps_wait_in_vain(libraries: Libraries, header: str) -> None:
    with pytest.raises(EmulationError):
        alternating(libraries.bench(*SETTINGS[2], seed=1, spoilt=(header, "c.s.searches", "c.s.epoch")))


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_seen(libraries: Libraries, name: str) -> None:
    with pytest.raises((AssertionError, EmulationError)) as raised:
        agrees_in_any_order(libraries, BREAKS[name])
    if "aligned" in name:
        assert "is not aligned to" in str(raised.value)


def agrees_in_any_order(libraries: Libraries, spoilt: Spoilt) -> None:
    for seed in SEEDS:
        errors = step_errors(libraries.bench(*SETTINGS[2], seed=seed, spoilt=spoilt))
        assert worst(errors) <= BOUND
