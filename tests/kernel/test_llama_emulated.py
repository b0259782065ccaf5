"""The kernel on the host where it runs a Llama: pairs half a head apart, blocks in sequence, wide layers.

Against the oracle, and against PyTorch and transformers in float32, which know nothing of plans.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.kernel.check.against_model import NOISE, ModelBench, error, noise_ratio, random_prompts
from headrace.kernel.check.against_oracle import (
    BOUND,
    SETTINGS,
    Bench,
    buffer_errors,
    changed_by_capacity,
    changed_by_launches,
    changed_by_others,
    step_errors,
    worst,
)
from headrace.model.checkpoint import load_model
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS
from headrace.model.synthetic import synthetic_model
from headrace.step.oracle.world import llama, tokens_of
from tests.kernel.emulated import COMPILER, EmulationError, Spoilt
from tests.kernel.emulated.decode import EmulatedKernel
from tests.kernel.emulated.libraries import SMS, Libraries
from tests.kernel.llamas import MANY_HEADS, SHAPES, WIDE
from tests.model.reference import LLAMA3_ROPE, make_reference

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"), pytest.mark.timeout(240)]

OTHER_WEIGHTS: Spoilt = ("streamed.h", "(weights + page * OF_PAGE)", "(weights)")

# Each is seen in the buffers of the second step, or the launch does not come to its end.
BREAKS: dict[str, Spoilt] = {
    "pairs are neighbours": (
        "ops/qkv_proj.h",
        "if (variant::HALF_SPLIT && turns) return half_split_tile",
        "if (false) return half_split_tile",
    ),
    "results stay where their weights are": (
        "ops/qkv_proj.h",
        "dim = pair - upper + upper * (HEAD_DIM / 2)",
        "dim = 2 * pair",
    ),
    "a lane keeps the other half": (
        "ops/qkv_proj.h",
        "upper ? turned.x : turned.y, 1)",
        "upper ? turned.y : turned.x, 1)",
    ),
    "pairs turn with the next pair's frequency": (
        "ops/qkv_proj.h",
        "c.s.frequencies[pair])",
        "c.s.frequencies[pair ^ 1])",
    ),
    "every page is multiplied with the first one's columns": (
        "streamed.h",
        "static_cast<size_t>(page) *",
        "static_cast<size_t>(0) *",
    ),
}
# Seen only where there are more pairs of rows and KV heads than two rounds of lanes.
ROUND_LOST: Spoilt = (
    "items.h",
    "value = round == n ? values[n] : value",
    "value = round == n ? values[0] : value",
)


def launched(bench: Bench, steps: int) -> dict[str, float]:
    """Of the buffers that the last of some steps leaves; the steps before have made the same tokens."""
    oracle, kernel = bench.oracle(), bench.kernel()
    right = [tokens_of(sampled) for sampled in oracle.launch(bench.rows, steps)]
    made = [list(tokens) for tokens in kernel.launch(bench.rows, steps)]
    assert made[:-1] == right[:-1]
    return buffer_errors(bench, kernel, oracle)


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS)
def test_a_step_leaves_what_the_oracle_leaves(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    errors = step_errors(libraries.bench(lengths, rows, hole, config=llama()))
    assert worst(errors) <= BOUND, errors


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[::2])
def test_heads_of_other_sizes(
    libraries: Libraries, name: str, lengths: list[int], rows: int, hole: int | None
) -> None:
    errors = step_errors(libraries.bench(lengths, rows, hole, config=SHAPES[name]))
    assert worst(errors) <= BOUND, errors


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[::2])
def test_later_steps_read_what_earlier_ones_wrote(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    errors = launched(libraries.bench(lengths, rows, hole, config=llama()), 3)
    assert worst(errors) <= BOUND, errors


def test_pages_hold_what_pytorch_writes_there(libraries: Libraries) -> None:
    """Keys in the model's own order of elements: prompts write them, and read what decoding wrote."""
    bench = libraries.bench([130, 1, 64, 65], 4, config=llama())
    kernel = bench.kernel()
    assert isinstance(kernel, EmulatedKernel)
    list(kernel.launch(bench.rows, 1))
    bench.world.logits(bench.world.rows())
    for row in bench.world.rows():
        block = torch.tensor([row.tables[KVGroup.FULL][row.position // BLOCK_TOKENS]])
        for layer in range(bench.world.config.num_layers):
            pairs = zip(kernel._cache.read(layer, block), bench.world.cache.read(layer, block), strict=True)
            for ours, theirs in pairs:
                at = row.position % BLOCK_TOKENS
                assert error(ours[at], theirs[at]) <= BOUND


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[2:3])
def test_bits_do_not_depend_on_the_launch_or_on_others(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    bench = libraries.bench(lengths, rows, hole, config=llama(), seed=2)
    assert changed_by_launches(bench, steps=3) == 0
    assert changed_by_others(bench, steps=2) == 0


def test_a_row_has_the_same_bits_at_every_capacity(libraries: Libraries) -> None:
    """One row's values of the wide feed-forward have a place in shared memory, others come page by page."""
    benches = [libraries.bench([130], rows, seed=rows, config=llama()) for rows in (1, 2, 4, 8, 16)]
    assert changed_by_capacity(benches, steps=2) == 0


@pytest.mark.parametrize(("lengths", "rows", "hole"), SETTINGS[1::2])
def test_a_hidden_size_that_is_too_wide_to_hold(
    libraries: Libraries, lengths: list[int], rows: int, hole: int | None
) -> None:
    """One and two rows of norm(X) stay in shared memory, more are put through the norm page by page."""
    errors = step_errors(libraries.bench(lengths, rows, hole, config=WIDE))
    assert worst(errors) <= BOUND, errors


@pytest.mark.parametrize("rows", [1, 4])
def test_columns_of_another_page_are_seen(libraries: Libraries, rows: int) -> None:
    """Where pages are put through the norm; one row needs none of it."""
    bench = libraries.bench([130], rows, config=WIDE, spoilt=OTHER_WEIGHTS)
    assert (worst(step_errors(bench)) <= BOUND) == (rows == 1)


def test_a_wide_row_has_the_same_bits_at_every_capacity(libraries: Libraries) -> None:
    benches = [libraries.bench([130], rows, seed=rows, config=WIDE) for rows in (1, 2, 4, 8, 16)]
    assert changed_by_capacity(benches, steps=1) == 0


def test_more_columns_than_one_row_has_a_place_for(libraries: Libraries) -> None:
    wide = replace(
        llama(), layers=tuple(replace(one, mlp=replace(one.mlp, width=6400)) for one in llama().layers)
    )
    errors = step_errors(libraries.bench([70], 1, config=wide))
    assert worst(errors) <= BOUND, errors


@pytest.mark.parametrize(("lengths", "rows"), [([90], 1), ([1, 64, 130], 4), ([5, 63, 64, 65, 128], 8)])
def test_logits_are_as_near_to_float32_as_pytorchs_own(
    libraries: Libraries, lengths: list[int], rows: int
) -> None:
    model = synthetic_model(llama(), seed=4, dtype=torch.bfloat16)
    prompts = random_prompts(model.config, lengths)
    bench = ModelBench(model, prompts, rows, make=libraries.maker(model.config, rows), sms=SMS)
    assert noise_ratio(bench) <= NOISE


def transformers_ratio(libraries: Libraries, folder: Path, spoilt: Spoilt | None = None) -> float:
    """How far the kernel's logits are from transformers' in float32, in PyTorch's distance in bfloat16.

    Of the last token of a prompt, and of two that are fed after it.
    """
    fields = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "rope_parameters": LLAMA3_ROPE}
    theirs = make_reference(folder, "llama", fields)
    model = load_model(folder, device="cpu", dtype=torch.bfloat16, progress=None)
    tokens = [int(token) for token in theirs.tokens[0]]
    make = libraries.maker(model.config, 2, spoilt=spoilt)
    bench = ModelBench(model, [tokens[:-2]], 2, make=make, sms=SMS)
    ours, torchs = [], []
    for token in (*tokens[-2:], 0):
        ours.append(bench.kernel_logits())
        torchs.append(bench.model_logits())
        bench.advance([token])
    right = theirs.logits[0, -3:]
    return error(torch.cat(ours), right) / error(torch.cat(torchs), right)


def test_logits_are_those_of_transformers(libraries: Libraries, tmp_path: Path) -> None:
    assert transformers_ratio(libraries, tmp_path) <= NOISE


@pytest.mark.parametrize("name", list(BREAKS)[:2])
def test_transformers_sees_what_is_broken(libraries: Libraries, name: str, tmp_path: Path) -> None:
    assert not transformers_ratio(libraries, tmp_path, BREAKS[name]) <= 3 * NOISE


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_seen(libraries: Libraries, name: str) -> None:
    bench = libraries.bench([130, 64], 2, config=llama(), spoilt=BREAKS[name])
    assert not worst(step_errors(bench)) <= 3 * BOUND


def test_a_round_that_is_lost_is_seen(libraries: Libraries) -> None:
    bench = libraries.bench(*SETTINGS[4], config=SHAPES[MANY_HEADS], spoilt=ROUND_LOST)
    with pytest.raises((AssertionError, EmulationError)):
        assert worst(step_errors(bench)) <= BOUND
