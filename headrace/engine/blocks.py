"""Which sequence owns which block of the KV cache.

There is one pool for each group of layers. A block has a count of its owners and is free at zero. Only the
engine's thread touches these objects. A block that is released may be handed out again at once, so nothing
is released while a backend's call that could read it is under way (see `headrace.engine.engine`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.engine.prefix import Node, PrefixCache, path_to
from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS, NO_BLOCK, blocks_for, first_visible_block


class BlockPool:
    """`size` blocks of one group, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.releases = 0  # ever made: when it has not moved, nothing new can fit
        self._owners = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: the block freed last is the warmest

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, block: int) -> int:
        """How many own a block."""
        return self._owners[block]

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
        self.releases += 1
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
    give back or to remember. Both let a step that needs no change pass at the price of one comparison.
    `node` is the last of its blocks that the prefix cache knows, `gave` where it left a tail to others. The
    first `adopted` blocks were there before it.
    """

    tables: dict[KVGroup, list[int]]
    node: Node | None = None
    gave: list[Node] = field(default_factory=list)
    adopted: int = 0
    given_back: int = 0
    capacity: int = 0
    trim_at: int = 0


class BlockManager:
    """Block tables of all sequences over the pools of all groups, and the prefix cache beside them.

    `window` is that of the sliding layers, or None for a model without any. What the cache alone owns makes
    way for sequences.
    """

    def __init__(
        self, sizes: Mapping[KVGroup, int], *, window: int | None, prefix_cache: bool = False
    ) -> None:
        self.pools = {group: BlockPool(size) for group, size in sizes.items()}
        self.window = window if KVGroup.SLIDING in sizes else None
        self.cache = PrefixCache(self.pools, window=self.window) if prefix_cache else None

    def new_sequence(self) -> SequenceBlocks:
        return SequenceBlocks({group: [] for group in self.pools})

    def adopt(self, sequence: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Give an empty sequence the blocks that are known of `tokens`; from which position it goes on."""
        if self.cache is None:
            return 0
        node, _ = self.cache.match(tokens)
        position = node.depth * BLOCK_TOKENS
        for group, blocks in self.cache.take(node).items():
            sequence.tables[group] += [NO_BLOCK] * (node.depth - len(blocks)) + blocks
        sequence.node, sequence.adopted, sequence.capacity = node, node.depth, position
        sequence.given_back = sequence.tables.get(KVGroup.SLIDING, []).count(NO_BLOCK)
        return position

    def remember(
        self, sequence: SequenceBlocks, tokens: Callable[[int, int], Sequence[int]], computed: int
    ) -> Node | None:
        """Let the cache know the full blocks of the first `computed` positions; `tokens` gives a range.

        Returns the node after which they part from what others had there, if that is among the new ones.
        """
        if self.cache is None:
            return None
        parting: Node | None = None
        node = sequence.node
        if node is None or node.detached:
            node = self.cache.root
        table = sequence.tables[KVGroup.FULL]
        for index in range(node.depth, computed // BLOCK_TOKENS):
            start, others = index * BLOCK_TOKENS, len(node.children)
            child = self.cache.add(node, tokens(start, start + BLOCK_TOKENS), table[index])
            if others and len(node.children) > others:
                parting = node
            node = child
        sequence.node = node
        return parting

    def keep_tail(self, sequence: SequenceBlocks, position: int | None = None) -> None:
        """Let others go on after the last block that the cache knows of this sequence, or `position`, the end
        of an earlier one.

        As for `keep_parting`, what is visible from there has to be in the table still.
        """
        node = sequence.node
        while node is not None and position is not None and node.depth * BLOCK_TOKENS > position:
            node = node.parent
        if node is not None:
            self._keep_tail(sequence, node)

    def keep_parting(self, sequence: SequenceBlocks, node: Node) -> None:
        """Let others go on after `node`, which `remember` gave, if that spares them enough.

        This comes before `trim`, so that what is visible from there is still in the table: a chunk need not
        end there.
        """
        if self.cache is not None and self.cache.worth_tail(node):
            self._keep_tail(sequence, node)

    def _keep_tail(self, sequence: SequenceBlocks, node: Node) -> None:
        if self.cache is None or node.detached:
            return
        tail: list[int] = []
        if self.window is not None:
            first = first_visible_block(node.depth * BLOCK_TOKENS, self.window)
            tail = sequence.tables[KVGroup.SLIDING][first : node.depth]
        if NO_BLOCK not in tail:
            if node.tail is None:
                sequence.gave.append(node)
            self.cache.keep_tail(node, tail)

    def can_hold(self, sequence: SequenceBlocks, tokens: int) -> bool:
        """Whether there is room for a sequence to reach `tokens`, its sliding layers seen at their end."""
        for group in self.pools:
            window = self.window if group is KVGroup.SLIDING else None
            visible = blocks_for(tokens) - first_visible_block(max(tokens - 1, 0), window)
            missing = blocks_for(tokens) - sequence.capacity // BLOCK_TOKENS
            count = min(visible, missing)
            if count > self.pools[group].free and count > self.pools[group].free + self.cached(group):
                return False
        return True

    @property
    def releases(self) -> int:
        """How many blocks have been given back so far."""
        return sum(pool.releases for pool in self.pools.values())

    def grow(self, sequence: SequenceBlocks, tokens: int) -> bool:
        """Make the tables reach `tokens` positions. False, and nothing changed, if a pool is too small."""
        if tokens <= sequence.capacity:
            return True
        count = blocks_for(tokens) - sequence.capacity // BLOCK_TOKENS
        if not all(self._make_room(group, count) for group in self.pools):
            return False
        for group, table in sequence.tables.items():
            table += self.pools[group].allocate(count)
        sequence.capacity += count * BLOCK_TOKENS
        return True

    def trim(self, sequence: SequenceBlocks, position: int) -> None:
        """Give back what no query from the beginning of the block of `position` on can see.

        That block's beginning, and not the position itself, because others may go on from there.
        """
        if position < sequence.trim_at:
            return
        sequence.trim_at = (position // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        if self.window is None:
            return
        table, pool = sequence.tables[KVGroup.SLIDING], self.pools[KVGroup.SLIDING]
        start = position // BLOCK_TOKENS * BLOCK_TOKENS
        visible = min(first_visible_block(start, self.window), len(table))
        for index in range(sequence.given_back, visible):
            pool.release(table[index])
            table[index] = NO_BLOCK
        sequence.given_back = max(sequence.given_back, visible)

    def release(self, sequence: SequenceBlocks) -> None:
        """Give everything back."""
        for group, table in sequence.tables.items():
            for block in table:
                if block != NO_BLOCK:
                    self.pools[group].release(block)
            table.clear()
        sequence.node = None
        sequence.gave.clear()
        sequence.adopted = sequence.given_back = sequence.capacity = sequence.trim_at = 0

    def forget(self, sequence: SequenceBlocks) -> None:
        """Let the cache forget the blocks of a sequence whose KV is not to be read again.

        What it wrote goes with all that follows: whoever has gone on from there has read it, or has the same
        tokens in blocks of its own, which the cache gets later. Of what it adopted, that stays from which
        others have gone on: if these fail too, the last of them brings it here.
        """
        if self.cache is None or sequence.node is None:
            return
        for node in sequence.gave:  # the blocks may be another's, and sound, but these tails are not
            self.cache.forget_tail(node)
        table, adopted = sequence.tables[KVGroup.FULL], sequence.adopted
        last = sequence.node
        for node in path_to(sequence.node):  # the last first
            if node.depth > adopted and node.block == table[node.depth - 1] and not node.detached:
                self.cache.drop(node)
        while last.detached and last.parent is not None:
            last = last.parent
        self.cache.forget(last)

    def cached(self, group: KVGroup) -> int:
        """How many blocks only the cache owns; they make way for sequences."""
        if self.cache is None:
            return 0
        references = Counter(block for blocks in self.cache.held(group) for block in blocks)
        return sum(self.pools[group].owners(block) == count for block, count in references.items())

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raise RuntimeError unless `sequences`, all that exist, and the cache account for every block."""
        known = list(sequences)
        for group, pool in self.pools.items():
            held = self.cache.held(group) if self.cache is not None else ()
            pool.check([*(sequence.tables[group] for sequence in known), *held])

    def _make_room(self, group: KVGroup, count: int) -> bool:
        if count <= self.pools[group].free:
            return True
        return self.cache is not None and self.cache.make_room(group, count)
