"""The kernel on the host against the oracle, where contexts, lengths and routings are extreme."""

from __future__ import annotations

import pytest

from headrace.kernel.check.against_oracle import BOUND, ROW_BOUND, row_errors, step_errors, worst
from headrace.step.oracle.past import NoisyPast, edges
from tests.kernel.emulated import COMPILER, EmulationError, Spoilt
from tests.kernel.emulated.libraries import Libraries
from tests.kernel.extremes import CONTEXTS, EDGES, ROUTINGS, WIDE_WINDOW, routed, routing_errors

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

BREAKS: dict[str, Spoilt] = {
    "a window of one token more": (
        "ops/attention.h",
        "token > position - window",
        "token >= position - window",
    ),
    "a window of one token less": (
        "ops/attention.h",
        "token > position - window",
        "token > position - window + 1",
    ),
    "a token's scores are another's": (
        "ops/attention.h",
        "+ place.four() * FOUR, position",
        ", position",
    ),
    "values that are not seen stay": (
        "ops/attention.h",
        "(place.half() * 32 + c.lane()) * 2 + place.four();",
        "(place.half() * 32 + c.lane()) * 2;",
    ),
    "one chunk too few": (
        "items.h",
        "divided_up(visible, size), 0}",
        "max(1, divided_up(visible, size) - 1), 0}",
    ),
}
# Seen only where as many experts are active as can be.
EXPERT_LOST: Spoilt = (
    "route.h",
    "s.route.users[place] = chosen[n];",
    "s.route.users[place] = place == 127 ? 0u : chosen[n];",
)
# Seen only where a task has more orders than there is room for.
ORDERS_LOST: Spoilt = (
    "orders.h",
    "room = ORDERS - static_cast<int>",
    "room = 2 * ORDERS - static_cast<int>",
)


def errors(libraries: Libraries, lengths: list[int], spoilt: Spoilt | None = None) -> dict[str, float]:
    return row_errors(libraries.bench(lengths, 4, config=WIDE_WINDOW, world=NoisyPast, seed=1, spoilt=spoilt))


def test_contexts_of_65537_tokens_and_less(libraries: Libraries) -> None:
    found = errors(libraries, CONTEXTS[:4])
    assert worst(found) <= ROW_BOUND, found


@pytest.mark.parametrize("name", BREAKS)
def test_a_token_or_a_chunk_that_is_missed_is_seen(libraries: Libraries, name: str) -> None:
    """In a row of many tokens, and although the row's other tokens are all there."""
    assert not worst(errors(libraries, [4500, 9000], BREAKS[name])) <= 2 * ROW_BOUND


def test_edges_are_where_chunks_and_windows_begin_and_end() -> None:
    assert edges(300, 0) == [0, 127, 128, 255, 256, 299]
    assert edges(8192, 4096) == [4097, 4223, 4224, 6143, 6144, 8191]
    assert edges(1, 0) == edges(1, 70) == [0]


def test_lengths_around_every_edge(libraries: Libraries) -> None:
    found = step_errors(libraries.bench(EDGES, 16))
    assert worst(found) <= BOUND, found


def agrees(libraries: Libraries, name: str, spoilt: Spoilt | None = None) -> None:
    lengths, config = routed(name)
    found = routing_errors(libraries.bench(lengths, 16, config=config, sms=4, spoilt=spoilt), name)
    assert worst(found) <= BOUND, found


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(libraries: Libraries, name: str) -> None:
    agrees(libraries, name)


@pytest.mark.parametrize("spoilt", [EXPERT_LOST, ORDERS_LOST], ids=["an expert", "orders"])
def test_what_is_lost_is_seen(libraries: Libraries, spoilt: Spoilt) -> None:
    with pytest.raises((AssertionError, EmulationError)):
        agrees(libraries, "every expert, each by one row", spoilt)
