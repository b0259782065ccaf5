"""What a setting may be called."""

from __future__ import annotations

import pytest

from headrace.bench.points import DEFAULT_POINTS, Point, PointError, name_of, parse_point


def test_rows_that_are_all_alike() -> None:
    assert parse_point("4x8K") == Point((8192,) * 4)
    assert parse_point("1x256k") == Point((262144,))
    assert parse_point("2x100").context == 100


def test_rows_of_mixed_lengths_grow_geometrically_from_one_end_to_the_other() -> None:
    assert parse_point("4x1K..8K") == Point((1024, 2048, 4096, 8192))
    mixture = parse_point("8x1K..64K")
    assert (mixture.contexts[0], mixture.contexts[-1], mixture.rows) == (1024, 65536, 8)
    assert any(context % 64 for context in mixture.contexts)  # not only whole blocks
    assert mixture.context == list(mixture.contexts)


@pytest.mark.parametrize("text", ["8K", "x8K", "17x8K", "0x8K", "1x0", "2x8K..4K", "1x8M", "1x8K,2x8K"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PointError, match=text.split(",")[0]):
        parse_point(text)


def test_names_in_tables() -> None:
    assert name_of(1, 8192) == "8K"
    assert name_of(1, 100) == "100"
    assert name_of(2, [65536, 1024]) == "1K..64K"


def test_the_default_points_are_well_formed() -> None:
    assert [parse_point(text).rows for text in DEFAULT_POINTS] == [1, 2, 4, 8, 16, 1, 1, 1, 1, 8]
