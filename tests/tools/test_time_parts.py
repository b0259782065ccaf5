"""The parts of a layer that are timed on a GPU, done once each on a CPU; and what is said of their times."""

from __future__ import annotations

import pytest
import torch

from headrace.model import tiled
from headrace.step.oracle.world import north
from headrace.step.pack import pack_synthetic
from tools import time_parts
from tools.time_parts import BANDWIDTH, PEAK, Part, Parts, show, told

TOKENS, TILE = 192, 32


@pytest.fixture(scope="module")
def parts() -> Parts:
    weights = pack_synthetic(north(), device="cpu", dtype=torch.bfloat16)
    return Parts(north(), weights, TOKENS, device="cpu")


def seen(past: int, window: int | None) -> int:
    """How many positions tokens after a past see in all, one by one."""
    every = range(past + 1, past + TOKENS + 1)
    return sum(position if window is None else min(position, window) for position in every)


def test_what_is_computed_can_be(parts: Parts) -> None:
    assert [part.name for part in parts.products()] == ["q", "k", "experts up", "experts down"]
    for part in [*parts.products(), *parts.moves()]:
        part.work()
        assert (part.operations > 0) != (part.moved > 0)
    matrix = f"blocks.{parts.layer}.mlp.experts.gate_up"
    torch.testing.assert_close(
        parts.gate_up, parts.weights.get(matrix), rtol=0, atol=0
    )  # the last unpacked it


def test_operations_of_attention_are_those_of_all_pairs(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE", TILE)
    config = parts.config
    window = config.window
    assert window is not None
    assert window < TOKENS
    each = 4 * config.num_heads * config.head_dim
    found = {}
    for part in parts.attention():
        part.work()
        found[part.name] = part.operations / each
    for name in ("flash", "tiles"):
        assert found[f"{name}, full"] == seen(0, None)
        assert found[f"{name}, window"] == seen(0, window)
        assert found[f"{name}, full, past of {TOKENS}"] == pytest.approx(seen(TOKENS, None))
        assert found[f"{name}, window, past of {TOKENS}"] == seen(TOKENS, window)


def test_what_is_said_of_a_time() -> None:
    half = Part("products", lambda: None, operations=PEAK / 1000)
    assert told(half, 0.002) == "products: 2.000 ms, 494 TFLOP/s, 50% of the peak"
    quarter = Part("rows", lambda: None, moved=BANDWIDTH / 1000)
    assert told(quarter, 0.004) == "rows: 4.000 ms, 1.20 TB/s, 25% of the peak"


def test_what_cannot_be_done_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("there is no such kernel")

    show(Part("cudnn", fail))
    assert capsys.readouterr().out == "cudnn: there is no such kernel\n"
    monkeypatch.setattr(time_parts, "timed", lambda work: 0.001)
    show(Part("rows", fail, moved=BANDWIDTH / 1000))
    assert capsys.readouterr().out == "rows: 1.000 ms, 4.80 TB/s, 100% of the peak\n"
