"""Which sequence owns which block of the KV cache.

There is one pool for each group of layers. A block has a count of its owners and is free at zero. Only the
engine's thread touches these objects. A block that is released may be handed out again at once, so nothing
is released while a backend's call that could read it is under way (see `headrace.engine.engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, NO_BLOCK, blocks_for, first_visible_block


class BlockPool:
    """`size` blocks of one group, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._owners = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: the block freed last is the warmest

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks. The caller has looked at `free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add an owner to a block that has one."""
        if not self._owners[block]:
            raise RuntimeError(f"block {block} is free and cannot be shared")
        self._owners[block] += 1

    def release(self, block: int) -> None:
        """Take one owner away."""
        if not self._owners[block]:
            raise RuntimeError(f"block {block} is released twice")
        self._owners[block] -= 1
        if not self._owners[block]:
            self._free.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise RuntimeError unless `tables`, all that exist, account for every owner of every block."""
        counted = [0] * self.size
        for table in tables:
            for block in table:
                if block != NO_BLOCK:
                    counted[block] += 1
        if counted != self._owners:
            wrong = [i for i in range(self.size) if counted[i] != self._owners[i]]
            raise RuntimeError(
                f"owner counts of blocks {wrong[:8]} disagree with the tables: leak or double use"
            )
        if sorted(self._free) != [i for i in range(self.size) if not counted[i]]:
            raise RuntimeError("the free list is not the set of blocks without an owner")


@dataclass(slots=True)
class SequenceBlocks:
    """The block tables of one sequence; `given_back` leading entries of the sliding one have been given back.

    `capacity` counts the positions that the tables reach; before a query at `trim_at` there is nothing to
    give back. Both let a step that needs no change pass at the price of one comparison.
    """

    tables: dict[KVGroup, list[int]]
    given_back: int = 0
    capacity: int = 0
    trim_at: int = 0


class BlockManager:
    """Block tables of all sequences over the pools of all groups.

    `window` is that of the sliding layers, or None for a model without any.
    """

    def __init__(self, sizes: Mapping[KVGroup, int], *, window: int | None) -> None:
        self.pools = {group: BlockPool(size) for group, size in sizes.items()}
        self._window = window if KVGroup.SLIDING in sizes else None

    def new_sequence(self) -> SequenceBlocks:
        return SequenceBlocks({group: [] for group in self.pools})

    def can_hold(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` fits into the free blocks, its sliding layers seen at their end."""
        for group, pool in self.pools.items():
            window = self._window if group is KVGroup.SLIDING else None
            if blocks_for(tokens) - first_visible_block(max(tokens - 1, 0), window) > pool.free:
                return False
        return True

    def grow(self, sequence: SequenceBlocks, tokens: int) -> bool:
        """Make the tables reach `tokens` positions. False, and nothing changed, if a pool is too small."""
        if tokens <= sequence.capacity:
            return True
        count = blocks_for(tokens) - sequence.capacity // BLOCK_TOKENS
        if any(count > pool.free for pool in self.pools.values()):
            return False
        for group, table in sequence.tables.items():
            table += self.pools[group].allocate(count)
        sequence.capacity += count * BLOCK_TOKENS
        return True

    def trim(self, sequence: SequenceBlocks, position: int) -> None:
        """Give back what no query at `position` or later can see."""
        if self._window is None or position < sequence.trim_at:
            return
        table, pool = sequence.tables[KVGroup.SLIDING], self.pools[KVGroup.SLIDING]
        visible = min(first_visible_block(position, self._window), len(table))
        for index in range(sequence.given_back, visible):
            pool.release(table[index])
            table[index] = NO_BLOCK
        sequence.given_back = max(sequence.given_back, visible)
        sequence.trim_at = (visible + 1) * BLOCK_TOKENS + self._window - 1

    def release(self, sequence: SequenceBlocks) -> None:
        """Give everything back."""
        for group, table in sequence.tables.items():
            for block in table:
                if block != NO_BLOCK:
                    self.pools[group].release(block)
            table.clear()
        sequence.given_back = sequence.capacity = sequence.trim_at = 0

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raise RuntimeError unless `sequences`, all that exist, account for every block."""
        known = list(sequences)
        for group, pool in self.pools.items():
            pool.check(sequence.tables[group] for sequence in known)
