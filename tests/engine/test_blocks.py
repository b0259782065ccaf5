"""Block pools and tables."""

from __future__ import annotations

import pytest

from headrace.engine.blocks import BlockManager, BlockPool
from headrace.model.config import KVGroup
from headrace.model.kv import NO_BLOCK, blocks_for, first_visible_block

FULL, SLIDING = KVGroup.FULL, KVGroup.SLIDING


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    assert pool.free == 1
    pool.release(block)
    assert pool.free == 2


def test_misuse_of_a_pool_is_an_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="released twice"):
        pool.release(0)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(0)
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)


def test_growth_is_all_or_nothing() -> None:
    manager = BlockManager({FULL: 4, SLIDING: 2}, window=64)
    sequence = manager.new_sequence()
    assert not manager.grow(sequence, 3 * 64)
    assert [pool.free for pool in manager.pools.values()] == [4, 2]
    assert manager.grow(sequence, 2 * 64)
    assert [len(table) for table in sequence.tables.values()] == [2, 2]


@pytest.mark.parametrize(
    ("position", "window", "first"),
    [
        (0, 100, 0),
        (99, 100, 0),
        (162, 100, 0),
        (163, 100, 1),
        (164, 100, 1),
        (64, 1, 1),
        (63, 1, 0),
        (10**6, None, 0),
    ],
)
def test_first_visible_block(position: int, window: int | None, first: int) -> None:
    """A query at p sees p - window + 1 .. p, itself counted."""
    assert first_visible_block(position, window) == first


def test_trim_leaves_holes_and_releases_once() -> None:
    manager = BlockManager({FULL: 4, SLIDING: 4}, window=65)
    sequence = manager.new_sequence()
    manager.grow(sequence, 200)
    manager.trim(sequence, 191)
    manager.trim(sequence, 191)
    assert sequence.tables[SLIDING][:1] == [NO_BLOCK]
    assert NO_BLOCK not in sequence.tables[SLIDING][1:]
    assert NO_BLOCK not in sequence.tables[FULL]
    manager.check([sequence])
    manager.release(sequence)
    assert [pool.free for pool in manager.pools.values()] == [4, 4]
    manager.check([])


def test_the_check_sees_leaks_and_double_use() -> None:
    manager = BlockManager({FULL: 4}, window=None)
    sequence = manager.new_sequence()
    manager.grow(sequence, 100)
    with pytest.raises(RuntimeError, match="disagree with the tables"):
        manager.check([])
    with pytest.raises(RuntimeError, match="disagree with the tables"):
        manager.check([sequence, sequence])


def test_blocks_for() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]
