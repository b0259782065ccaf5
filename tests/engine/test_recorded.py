"""Parts of passes that a server on an H200 logged: a `Pace` that sees them would have kept to the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.engine import part_costs
from headrace.engine.filling import Filling
from headrace.engine.options import GPU_CHUNK
from headrace.engine.pace import Pace
from headrace.engine.part_costs import PartCosts
from tests.engine.recorded import LAST, Asked, fitted, recorded, replay

GAP = 0.04


def asked(run: str, *, apart: bool = False) -> list[Asked]:
    """What is asked beside the 131,000 tokens of a run, but for single layers, which cannot be cut."""
    pace = Pace(most=GPU_CHUNK, gap=GAP, layered=True)
    return [each for each in replay(pace, run, apart=apart) if each.done.tokens > 1000 and each.layers > 1]


def late(parts: list[Asked]) -> float:
    """The share of parts after which an answer would have waited longer than the bound."""
    return sum(each.gap > GAP for each in parts) / len(parts)


@pytest.mark.parametrize("run", ["A", "B"])
def test_two_numbers_account_for_all_parts_of_a_pass(run: str) -> None:
    """So they may say what other parts would have taken. The server's own cuts were off by more."""
    passes = [each for each in recorded(run) if each.tokens > 1000]
    costs = fitted(passes)
    off = sorted(
        abs(part.seconds - part.layers * costs[each].layer - part.full * costs[each].past)
        for each in passes
        for part in each.parts[1:]
    )
    assert len(off) > 200
    assert off[len(off) // 2] < 0.0005
    assert off[int(0.99 * len(off))] < 0.003


@pytest.mark.parametrize("run", ["A", "B"])
def test_parts_that_would_have_been_run_keep_to_the_bound(run: str) -> None:
    parts = asked(run)
    assert len(parts) > 150
    assert late(parts) <= 0.01
    assert max(each.gap for each in parts) < 0.042
    middle = sorted(each.gap for each in parts)[len(parts) // 2]
    assert middle > 0.031, "and make use of it: 29 ms were measured"


@pytest.mark.parametrize("run", ["A", "B"])
def test_a_last_layer_of_its_own_would_tell_that_the_past_costs_nothing(run: str) -> None:
    """As it did: it sees all of the past, as the others of its kind, and takes a millisecond."""
    parts = asked(run, apart=True)
    assert late(parts) > 0.01
    assert max(each.gap for each in parts) > 0.045


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the past costs."""
    monkeypatch.setattr(PartCosts, "_past", lambda self, filling: 0.0)


def trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chunk is thought to cost, not what its parts took."""
    monkeypatch.setattr(PartCosts, "_layer", lambda self, filling, expected: 0.8 * expected)


def dares(monkeypatch: pytest.MonkeyPatch) -> None:
    """To plan all of the room and a tenth more."""
    monkeypatch.setattr(part_costs, "_SURE", 1.1)


@pytest.mark.parametrize("breaks", [forgets, trusts, dares])
def test_what_is_broken_on_purpose_is_seen(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    breaks(monkeypatch)
    assert all(late(asked(run)) > 0.01 for run in ("A", "B"))


def test_chunks_are_made_smaller_where_one_layer_took_too_long() -> None:
    """Without that, in run B, single layers took 35 and 36 ms behind 119,578 tokens, beside steps of 6."""
    pace = Pace(most=GPU_CHUNK, gap=GAP, layered=True)
    replay(pace, "B")
    [long] = [each for each in recorded("B") if each.past == 119_578]
    single = [part.seconds for part in long.parts[1:] if part.layers == 1]
    assert min(single) + 0.0055 > GAP
    assert 4096 < pace.bearable(streams=4, past=119_578) < 8192
    assert pace.bearable(streams=4, past=60_000) >= 8192, "there they took 20: run A had 4,910 tokens"


def test_the_record_is_that_of_a_model_whose_last_layer_is_next_to_nothing() -> None:
    lasts = [
        each.parts[-1].seconds
        for run in ("A", "B")
        for each in recorded(run, apart=True)
        if each.parts[-1].layers == 1
    ]
    assert len(lasts) > 20
    assert max(lasts) <= LAST


def test_recorded_parts_make_up_whole_passes() -> None:
    for run in ("A", "B"):
        prompts = [each for each in recorded(run) if each.tokens > 1000]
        assert sum(each.tokens for each in prompts) == 130_999, "the last token gives the first of the answer"
        for each in recorded(run):
            assert sum(part.layers for part in each.parts) == 48
            filling: Filling = each.begin()
            assert filling.pairs == each.pairs
