"""What parts of a pass cost, as the log of a server on an H200 told."""

from __future__ import annotations

import pytest

from headrace.engine.filling import Filling, Part
from headrace.engine.pace import Pace
from headrace.engine.part_costs import PartCosts
from headrace.model.batch import Span

FULL = [layer % 4 == 0 for layer in range(49)]
PAIR = 27e-12

# Tokens, the position they begin at, milliseconds of a layer that does not see the whole past, and those by
# which the first part was longer than its layers. Those that do cost 27 ps more for each pair.
PASSES = [
    (8192, 55956, 5.30, 3.0),
    (8192, 64148, 5.65, 3.5),
    (8192, 72340, 5.90, 4.9),
    (8192, 80532, 5.88, 8.2),
    (8192, 88724, 5.86, 4.8),
    (3083, 96916, 3.97, 13.3),
    (441, 0, 1.46, 23.2),
    (441, 0, 1.42, 0.8),
    (5648, 0, 3.38, 24.3),
]


def begun(tokens: int, start: int) -> Filling:
    return Filling([Span([1] * tokens, start, {})], [], lambda layers: None, FULL, left=49)


def ran(filling: Filling, layers: int, *, layer: float, more: float = 0.0, pair: float = PAIR) -> None:
    """So many layers more, of so many milliseconds each, and `more` in all."""
    full = sum(FULL[-filling.left :][:layers])
    spent = (layers * layer + more) / 1000 + full * pair * filling.pairs
    filling.parts.append(Part(layers, full, spent))
    filling.left -= layers


def watched(pace: Pace, tokens: int, start: int, layer: float, beginning: float) -> None:
    filling = begun(tokens, start)
    while filling.left:
        more = 0.0 if filling.parts else beginning
        ran(filling, min(filling.left, 3), layer=layer, more=more)
        seconds = pace.observe_part(filling)
    pace.observe(prompt_tokens=tokens, prefill=seconds, decode=0.0143, steps=1, rows=15)


@pytest.fixture
def pace() -> Pace:
    """One that has seen these passes."""
    pace = Pace(most=8192, gap=0.04, layered=True)
    for each in PASSES:
        watched(pace, *each)
    return pace


def test_the_parts_of_a_small_chunk_keep_the_bound_behind_large_ones(pace: Pace) -> None:
    """The first had 19 layers and took 59 ms: its beginning was not foreseen, and passes of about this size
    had just taken 1.4 ms a layer, beside fewer rows."""
    filling = begun(358, 5648)
    more, parts = 17.5, []
    while filling.left:
        parts.append(pace.layers(filling, rows=15))
        ran(filling, parts[-1], layer=2.2, more=more)
        more = 0.0
        pace.observe_part(filling)
    assert all(1000 * part.seconds + 14.3 < 40 for part in filling.parts)
    assert max(parts) > 8, "once it is known what they take"
    assert len(parts) < 9


@pytest.mark.parametrize(("done", "fitting"), [(4, 1), (5, 3), (6, 2), (7, 1)])
def test_parts_are_cut_by_the_kinds_of_the_layers_to_come(pace: Pace, done: int, fitting: int) -> None:
    """Behind 90,000 tokens there is room for three layers, or for one that sees them all, in 26 ms."""
    filling = begun(8192, 88724)
    ran(filling, done, layer=5.86)
    for _ in range(5):
        pace.observe(prompt_tokens=0, prefill=0.0, decode=0.0065, steps=1, rows=4)
    assert pace.layers(filling, rows=4) == fitting


def first_layer(tokens: int, past: int, beginning: float = 4.8) -> float:
    """Milliseconds of the dearest part: the first layer sees all of the past. The others take what passes of
    441 and of 8192 tokens tell, and the beginning what is usual for whole tiles."""
    return (
        beginning + 1.44 + (tokens - 441) * (5.7 - 1.44) / 7751 + 1000 * PAIR * tokens * (past + tokens / 2)
    )


@pytest.mark.parametrize("past", [60_000, 100_000, 131_000, 262_144 - 8192])
def test_a_chunk_is_as_large_as_its_dearest_layer_allows(pace: Pace, past: int) -> None:
    tokens = pace.bearable(streams=15, past=past)
    assert 20 < first_layer(tokens, past) < 40 - 14.3
    assert first_layer(8192, past) > 0.88 * (40 - 14.3), "some of the room is left to chance"


def test_chunks_are_large_where_small_ones_would_not_help(pace: Pace) -> None:
    assert pace.bearable(streams=15, past=0) == pace.bearable(streams=15, past=30_000) == 8192
    assert pace.bearable(streams=0, past=100_000) == 8192
    for _ in range(6):
        watched(pace, 8192, 100_000, 5.86, beginning=30.0)
    tokens = pace.bearable(streams=15, past=100_000)
    assert 18 < first_layer(tokens, 100_000, beginning=0.0) < 40 - 14.3, "no chunk fits with its beginning"


@pytest.mark.parametrize("past", [0, 30_000, 100_000, 262_144])
def test_a_prompt_takes_hardly_more_than_twice_as_long_for_small_chunks(pace: Pace, past: int) -> None:
    """There is a millisecond left for tokens beside the beginning."""
    for _ in range(6):
        watched(pace, 8192, 100_000, 5.86, beginning=20.5)
    tokens = pace.bearable(streams=15, past=past)
    fixed, each = 49 * (1.44 - 441 * (5.7 - 1.44) / 7751), 49 * (5.7 - 1.44) / 7751
    at_best = tokens * (each + 13 * 1000 * PAIR * (past + tokens / 2))
    assert 1.8 * at_best < fixed + at_best < 2.3 * at_best


def test_layers_that_cannot_be_run_one_by_one_do_not_bound_a_chunk(pace: Pace) -> None:
    pace.layered = False
    assert pace.bearable(streams=15, past=100_000) == 8192


def test_the_cost_of_the_past_is_told_from_that_of_the_layers(pace: Pace) -> None:
    assert pace._parts.pair == pytest.approx(PAIR, rel=0.05)
    assert pace._cost.of(8192) == pytest.approx(49 * 0.0056, rel=0.1), "wherever it begins"


def test_accidents_do_not_tell_what_the_past_costs() -> None:
    costs = PartCosts()
    filling = begun(8192, 40000)
    for late in (0, 0, 500, 0, 0, 0, 0, 0, 67):
        ran(filling, 3, layer=5.5, more=late)
        costs.observe(filling)
    assert costs.pair == pytest.approx(PAIR, rel=0.1)


def test_passes_that_run_at_once_tell_what_the_past_costs() -> None:
    """Two that differ in their past are enough; what all of them begin with is not the past's."""
    costs = PartCosts()
    for start in (0, 16384):
        filling = begun(16384, start)
        ran(filling, 49, layer=6.0, more=20.0)
        costs.observe(filling)
    assert costs.pair == pytest.approx(PAIR, rel=0.01)


def test_passes_at_once_and_parts_are_not_compared() -> None:
    """A mean over all layers has the beginning in it, which would be taken for the cost of the past."""
    costs = PartCosts()
    for start in (0, 4096, 8192):
        filling = begun(8192, start)
        while filling.left:
            ran(filling, min(filling.left, 3), layer=5.5)
            costs.observe(filling)
    for _ in range(8):
        filling = begun(8192, 200_000)
        ran(filling, 49, layer=5.5, more=300.0)
        costs.observe(filling)
    assert costs.pair == pytest.approx(PAIR, rel=0.02)


def test_a_pass_has_its_own_time_at_least_whatever_parts_tell() -> None:
    costs = PartCosts()
    filling = begun(8192, 88724)
    ran(filling, 49, layer=1.0, pair=0.0)
    costs.pair = 1e-9
    assert costs.bare(filling) == pytest.approx(0.1 * filling.seconds)


def test_before_any_pass_one_layer_tells_what_the_next_may_cost() -> None:
    costs = PartCosts()
    filling = begun(441, 0)
    assert costs.fitting(filling, room=0.03, layer=0.001) == 1
    ran(filling, 1, layer=2.0)
    costs.observe(filling)
    assert costs.fitting(filling, room=0.03, layer=0.001) == 13
    assert costs.fitting(filling, room=1.0, layer=0.001) == 48
    assert costs.fitting(filling, room=0.0, layer=0.001) == 1
