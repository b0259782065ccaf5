"""The prefix cache: KV of past requests that begin as a new one does.

A tree of blocks: a node is one full block of tokens after those of its parent, and owns the block of the
full-attention layers that holds their KV. Sliding layers need only the last window before the position at
which a request goes on, so a node may also own a tail: the sliding blocks that a query right after it sees.
A request can go on after a node that has a tail (any node, in a model without sliding layers).

Tails are kept where requests are likely to go on: at the end of a prompt, at the end of a turn, every
TAIL_TOKENS along long prompts, and where a prompt parts from another (after a system prompt, say, or before
what a client changes in its middle): the first one to part pays, and those after it go on there. When a pool
runs out, what was used least recently goes first. All blocks of a conversation are touched together, so
conversations go one by one, the ends of their blocks first; a sliding pool that is short takes tails, not the
blocks of the full layers. Only the engine's thread calls this.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.model.config import KVGroup
from headrace.model.kv import BLOCK_TOKENS

if TYPE_CHECKING:
    from headrace.engine.blocks import BlockPool

TAIL_TOKENS = 8192
# So many tokens a tail where prompts part has to spare whoever goes on there. It takes up to a window of
# blocks (4,096 tokens of North's sliding layers) from tails that spare thousands of tokens each; and fewer
# tokens cost little beside any chunk: on an H200 these are 14 ms, and unpacking the experts for it is 36 ms.
LEAST_SPARED = 512


class Node:
    """A block of tokens after those of `parent`. `depth` counts the blocks up to and with this one."""

    __slots__ = ("block", "children", "depth", "parent", "stamp", "tail", "tail_stamp", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.stamp = 0
        self.tail: list[int] | None = None
        self.tail_stamp = 0

    @property
    def detached(self) -> bool:
        """Whether the node has been evicted."""
        return self.parent is not None and self.parent.children.get(self.tokens) is not self


Entry = tuple[int, int, int, Node]


class PrefixCache:
    """Owns blocks of `pools` beside the sequences; `window` is that of the sliding layers, None without."""

    def __init__(self, pools: Mapping[KVGroup, BlockPool], *, window: int | None) -> None:
        self._full = pools[KVGroup.FULL]
        self._sliding = pools.get(KVGroup.SLIDING)
        self._window = window
        self.root = Node(None, (), -1)
        self._clock = itertools.count(1)
        self._serial = itertools.count()
        # Heaps of (stamp, order, serial, node); an entry whose stamp is no longer the node's is stale.
        self._nodes: list[Entry] = []
        self._tails: list[Entry] = []

    def match(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """The node after which a request of `tokens` can go on, and how many blocks of it are known at all.

        At least one token is left to feed, so the last node ends before the last token.
        """
        node, usable = self.root, self.root
        for start in range(0, (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            child = node.children.get(tuple(tokens[start : start + BLOCK_TOKENS]))
            if child is None:
                break
            node = child
            if self._sliding is None or node.tail is not None:
                usable = node
        return usable, node.depth

    def take(self, node: Node) -> dict[KVGroup, list[int]]:
        """Block tables up to `node`, shared with the caller; the sliding one begins with its tail."""
        path = list(path_to(node))
        stamp = next(self._clock)
        for each in path:
            self._touch(each, stamp)
            self._full.share(each.block)
        tables = {KVGroup.FULL: [each.block for each in reversed(path)]}
        if self._sliding is not None:
            tail = node.tail or []
            self._touch_tail(node, stamp)
            for block in tail:
                self._sliding.share(block)
            tables[KVGroup.SLIDING] = list(tail)
        self._compact()
        return tables

    def add(self, node: Node, tokens: Sequence[int], block: int) -> Node:
        """The node of a full block of tokens after `node`; if it is new, it shares `block`, their KV."""
        key = tuple(tokens)
        child = node.children.get(key)
        if child is None:
            self._full.share(block)
            child = Node(node, key, block)
            node.children[key] = child
            self._touch(child, next(self._clock) if node is self.root else node.stamp)
        return child

    def keep_tail(self, node: Node, tail: Sequence[int]) -> None:
        """Let requests go on after `node`: share the sliding blocks that they will see."""
        if self._sliding is None or node is self.root:
            return
        if node.tail is None:
            for block in tail:
                self._sliding.share(block)
            node.tail = list(tail)
        stamp = next(self._clock)
        self._touch_tail(node, stamp)
        for each in path_to(node):
            self._touch(each, stamp)
        self._compact()

    def worth_tail(self, node: Node) -> bool:
        """Whether a tail at `node` would spare those who go on there enough, beside the tails above it."""
        if self._sliding is None:
            return False
        usable = next((each.depth for each in path_to(node) if each.tail is not None), 0)
        return (node.depth - usable) * BLOCK_TOKENS >= LEAST_SPARED

    def forget_tail(self, node: Node) -> None:
        """Let nobody go on after `node` any more."""
        self._drop_tail(node)

    def drop(self, node: Node) -> None:
        """Drop `node` and all that follows it, whoever else owns these blocks."""
        subtree = [node]
        for each in subtree:
            subtree += each.children.values()
        for each in reversed(subtree):
            self._drop(each)

    def forget(self, node: Node) -> None:
        """Drop `node` and what is above it, as far as no two sequences own these blocks."""
        while node.parent is not None and not node.detached and not node.children:
            parent = node.parent
            if self._full.owners(node.block) > 2:
                return
            self._drop(node)
            node = parent

    def make_room(self, group: KVGroup, count: int) -> bool:
        """Evict until `count` blocks of the group are free. False if what is left is in use."""
        if group is KVGroup.FULL:
            return self._evict_nodes(count)
        assert self._sliding is not None
        return self._evict_tails(self._sliding, count)

    def held(self, group: KVGroup) -> Iterator[list[int]]:
        """The blocks that the cache owns, for the check that every owner is accounted for."""
        for node in self._walk():
            if group is KVGroup.FULL:
                yield [node.block]
            elif node.tail is not None:
                yield node.tail

    def difference(self, tokens: Sequence[int]) -> tuple[int, int, int] | None:
        """Where `tokens` leave what is known: position, known token, given token. None if nothing is near."""
        node = self.root
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = tuple(tokens[start : start + BLOCK_TOKENS])
            child = node.children.get(block)
            if child is None:
                break
            node = child
        start = node.depth * BLOCK_TOKENS
        rest = tokens[start : start + BLOCK_TOKENS]
        best = max(node.children.values(), key=lambda child: _common(child.tokens, rest), default=None)
        if best is None or (common := _common(best.tokens, rest)) == len(rest):
            return None
        return start + common, best.tokens[common], rest[common]

    def _walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _touch(self, node: Node, stamp: int) -> None:
        # Deeper nodes first among those of one stamp. A node is never newer than its parent, so that what
        # comes first is a leaf.
        node.stamp = stamp
        heapq.heappush(self._nodes, (stamp, -node.depth, next(self._serial), node))

    def _touch_tail(self, node: Node, stamp: int) -> None:
        node.tail_stamp = stamp
        heapq.heappush(self._tails, (stamp, node.depth, next(self._serial), node))

    def _compact(self) -> None:
        """Throw out stale entries once they outnumber the others by far."""
        most = 4 * self._full.size + 1024
        if len(self._nodes) > most:
            self._nodes = [entry for entry in self._nodes if _is_current(entry)]
            heapq.heapify(self._nodes)
        if len(self._tails) > most:
            self._tails = [entry for entry in self._tails if _is_current_tail(entry)]
            heapq.heapify(self._tails)

    def _evict_nodes(self, count: int) -> bool:
        in_use = []
        while self._full.free < count and self._nodes:
            entry = heapq.heappop(self._nodes)
            node = entry[-1]
            if not _is_current(entry):
                continue
            if node.children or self._full.owners(node.block) > 1:
                in_use.append(entry)
            else:
                self._drop(node)
        # What is in use keeps all that it follows from going, also blocks that its sequence has again as
        # its own. So where room still lacks it leaves the cache, and stays its sequence's; ends first.
        for entry in in_use:
            if self._full.free < count and not entry[-1].children:
                self._drop(entry[-1])
            else:
                heapq.heappush(self._nodes, entry)
        return self._full.free >= count

    def _evict_tails(self, pool: BlockPool, count: int) -> bool:
        while pool.free < count and self._tails:
            entry = heapq.heappop(self._tails)
            if _is_current_tail(entry):
                self._drop_tail(entry[-1])
        return pool.free >= count

    def _drop(self, node: Node) -> None:
        assert node.parent is not None
        self._drop_tail(node)
        del node.parent.children[node.tokens]
        self._full.release(node.block)

    def _drop_tail(self, node: Node) -> None:
        if self._sliding is not None:
            for block in node.tail or ():
                self._sliding.release(block)
        node.tail = None


def _is_current(entry: Entry) -> bool:
    return entry[0] == entry[-1].stamp and not entry[-1].detached


def _is_current_tail(entry: Entry) -> bool:
    return entry[0] == entry[-1].tail_stamp and entry[-1].tail is not None


def path_to(node: Node) -> Iterator[Node]:
    """The node and what is above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two blocks begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
