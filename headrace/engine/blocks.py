"""Which sequence owns which block of the KV cache.

There is one pool for each group of layers. A block has a count of its owners and is free at zero. Only the
engine's thread touches these objects. A block that is released may be handed out again at once, so nothing
is released while a backend's call that could read it is under way (see `headrace.engine.engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.model.config import KVGroup
from headrace.model.kv import NO_BLOCK, blocks_for, first_visible_block


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
    """The block tables of one sequence, and how many leading entries of each have been given back."""

    tables: dict[KVGroup, list[int]]
    given_back: dict[KVGroup, int]


class BlockManager:
    """Block tables of all sequences over the pools of all groups."""

    def __init__(self, sizes: Mapping[KVGroup, int], *, window: int | None) -> None:
        self.pools = {group: BlockPool(size) for group, size in sizes.items()}
        self._windows = {KVGroup.FULL: None, KVGroup.SLIDING: window}

    def new_sequence(self) -> SequenceBlocks:
        return SequenceBlocks({group: [] for group in self.pools}, dict.fromkeys(self.pools, 0))

    def can_hold(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` fits into the free blocks, its sliding layers seen at their end."""
        for group, pool in self.pools.items():
            live = blocks_for(tokens) - first_visible_block(max(tokens - 1, 0), self._windows[group])
            if live > pool.free:
                return False
        return True

    def grow(self, sequence: SequenceBlocks, tokens: int) -> bool:
        """Make the tables reach `tokens` positions. False, and nothing changed, if a pool is too small."""
        wanted = blocks_for(tokens)
        short = {group: wanted - len(table) for group, table in sequence.tables.items()}
        if any(count > self.pools[group].free for group, count in short.items()):
            return False
        for group, count in short.items():
            if count > 0:
                sequence.tables[group] += self.pools[group].allocate(count)
        return True

    def trim(self, sequence: SequenceBlocks, position: int) -> None:
        """Give back what no query at `position` or later can see."""
        for group, table in sequence.tables.items():
            window = self._windows[group]
            if window is None:
                continue
            first = min(first_visible_block(position, window), len(table))
            for index in range(sequence.given_back[group], first):
                self.pools[group].release(table[index])
                table[index] = NO_BLOCK
            sequence.given_back[group] = max(sequence.given_back[group], first)

    def release(self, sequence: SequenceBlocks) -> None:
        """Give everything back."""
        for group, table in sequence.tables.items():
            for block in table[sequence.given_back[group] :]:
                self.pools[group].release(block)
            table.clear()
            sequence.given_back[group] = 0

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raise RuntimeError unless `sequences`, all that exist, account for every block."""
        known = list(sequences)
        for group, pool in self.pools.items():
            pool.check(sequence.tables[group] for sequence in known)
