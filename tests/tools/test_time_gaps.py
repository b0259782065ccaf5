"""The gaps that a long prompt makes, from known times of arrival."""

from __future__ import annotations

import pytest

from tools.time_gaps import GapError, gaps_of, main


def test_gaps_are_those_that_end_within_the_time() -> None:
    arrivals = [[0.0, 0.01, 0.02, 0.12, 0.13], [0.005, 0.015, 0.115]]
    found = gaps_of(arrivals, 0.1, 0.125)
    assert found.count == 2
    assert found.longest == pytest.approx(100)
    assert found.tokens_per_second == pytest.approx(2 / 0.025)


def test_a_single_long_gap_shows_at_the_top_and_not_in_the_middle() -> None:
    times = [0.01 * n for n in range(100)]
    found = gaps_of([[*times, times[-1] + 1]], 0, 10)
    assert found.middle == pytest.approx(10)
    assert found.percentile_99 == pytest.approx(1000)
    assert found.longest == pytest.approx(1000)


def test_no_gap_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(GapError, match="--tokens"):
        gaps_of([[0.0]], 0, 1)


def test_a_server_that_is_not_there_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:1"
    monkeypatch.setattr("sys.argv", ["time_gaps", "--url", url, "--quiet", "0"])
    with pytest.raises(SystemExit, match=f"Nothing was measured at {url}: .*refused"):
        main()
