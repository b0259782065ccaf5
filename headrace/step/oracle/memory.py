"""Exchange buffers that watch over their use.

A buffer is cut into regions: the pieces that one task publishes whole. Each region remembers who wrote it
last, for which layer and step, and when each agent read it last. Three hazards show, in any order of tasks:

- a read of what was not written for this layer and step (what is there is poison, or another layer's);
- a read of what was written, but not published to the reader by a counter that it waited for;
- a write to what another agent may still be reading, or was still writing, for all that the writer knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.model.kv import BLOCK_TOKENS, KVCache, keys_of, values_of
from headrace.step.buffers import BufferSpec, Scope, buffer_specs
from headrace.step.isa import TILE_ROWS, Buffer
from headrace.step.oracle.arithmetic import Floats
from headrace.step.oracle.clocks import Clocks
from headrace.step.oracle.errors import HazardError
from headrace.step.sizes import Sizes

Array = npt.NDArray[Any]
Index = Any  # of the leading dimensions, as NumPy takes it
PagePlace = tuple[int, int, int]  # layer, block, KV head

# Leading dimensions of a buffer that number its regions; the rest of the shape is within one.
_REGION_DIMENSIONS = {
    Buffer.PARTIALS: 3,
    Buffer.STATS: 2,
    Buffer.HISTOGRAM: 2,
    Buffer.TIES: 3,
    Buffer.CANDIDATES: 2,
}
_TYPES = {"bfloat16": np.float32, "float32": np.float32, "int32": np.int32, "uint64": np.uint64}
POISON = -0x5AFE_5AFE  # of integers; floating-point poison is NaN


@dataclass(frozen=True, slots=True)
class Toucher:
    """Who touches memory: an agent of an SM, in a step, for a layer. `task` is what messages call it."""

    agent: int
    epoch: int
    layer: int
    opcode: int
    task: object

    @property
    def version(self) -> int:
        """What tells the data of one operation of one layer of one step from all other data."""
        return (self.epoch << 32) | (self.layer << 8) | self.opcode


_OPERATION = (1 << 8) - 1  # of a version


class Regions:
    """The bookkeeping of one buffer, without its values.

    Data passes `between` the layers, as the residual stream does, or else serves the layer that made it.
    Only a `summed` buffer takes additions.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        clocks: Clocks,
        *,
        between: bool = False,
        summed: bool = False,
    ) -> None:
        self._name = name
        self._between = between
        self._clocks = clocks
        self._writer = np.full(shape, clocks.host, dtype=np.int32)
        self._clock = np.zeros(shape, dtype=np.int32)
        self._version = np.full(shape, -1, dtype=np.int64)
        self._reads = np.zeros((*shape, clocks.agents), dtype=np.int32)
        self._adds = np.zeros((*shape, clocks.agents), dtype=np.int32) if summed else None

    def read(self, index: Index, by: Toucher, *, lasting: bool = False) -> None:
        """Check and note a read. What is `lasting` need not have been written in this step."""
        if not lasting:
            self._check_version(index, by)
        unseen = self._unseen(index, by)
        if unseen.any():
            raise self._hazard(by, "reads what its counters have not published to it", index, unseen)
        self._reads[(*_tuple(index), ..., by.agent)] = self._clocks.now(by.agent)

    def write(self, index: Index, by: Toucher) -> None:
        """Check and note a write that replaces what was there."""
        self._check_quiet(index, by)
        unseen = self._unseen(index, by)
        if unseen.any():
            raise self._hazard(by, "overwrites what may still be being written", index, unseen)
        self._writer[index] = by.agent
        self._clock[index] = self._clocks.now(by.agent)
        self._version[index] = by.version

    def add(self, index: Index, by: Toucher) -> None:
        """Check and note an atomic addition: additions do not disturb one another."""
        self._check_quiet(index, by)
        unseen = self._replaced_unseen(index, by)
        if unseen.any():
            raise self._hazard(by, "adds to what may not have been cleared", index, unseen)
        assert self._adds is not None
        self._adds[(*_tuple(index), ..., by.agent)] = self._clocks.now(by.agent)
        self._version[index] = by.version

    def _check_version(self, index: Index, by: Toucher) -> None:
        found = np.asarray(self._version[index])
        if self._between:
            # Whose data it is to be, the reader does not say; but all of it must be of one operation.
            wrong = (found >> 32 != by.epoch) | (found != found.max(initial=-1))
        else:
            wrong = (found | _OPERATION) != (by.version | _OPERATION)
        if wrong.any():
            late = bool((found > (by.version | _OPERATION)).any())
            who = "a later layer or step has overwritten" if late else "nobody has written for it"
            raise self._hazard(by, f"reads what {who}", index, np.asarray(wrong))

    def _check_quiet(self, index: Index, by: Toucher) -> None:
        reading = self._reads[index] > self._clocks.known(by.agent)
        if reading.any():
            raise self._hazard(
                by, "overwrites what another task may still read", index, np.asarray(reading.any(axis=-1))
            )

    def _replaced_unseen(self, index: Index, by: Toucher) -> Array:
        return np.asarray(self._clock[index] > self._clocks.knowledge[by.agent][self._writer[index]])

    def _unseen(self, index: Index, by: Toucher) -> Array:
        unseen = self._replaced_unseen(index, by)
        if self._adds is not None:
            unseen = unseen | (self._adds[index] > self._clocks.known(by.agent)).any(axis=-1)
        return unseen

    def _hazard(self, by: Toucher, what: str, index: Index, where: Array) -> HazardError:
        numbers = np.arange(self._writer.size).reshape(self._writer.shape)[index]
        region = np.unravel_index(int(np.extract(where, numbers)[0]), self._writer.shape)
        place = ", ".join(str(int(part)) for part in region)
        writer = int(self._writer[region])
        last = "not written in this launch" if writer == self._clocks.host else f"written by SM {writer // 2}"
        return HazardError(f"{by.task} {what}: {self._name}[{place}], {last}")


class Exchange:
    """All exchange buffers: values with their regions."""

    def __init__(self, sizes: Sizes, clocks: Clocks) -> None:
        self.values: dict[Buffer, Array] = {}
        self.rounded: set[Buffer] = set()
        self._regions: dict[Buffer, Regions] = {}
        for buffer, spec in buffer_specs(sizes).items():
            if spec.scope is Scope.EXCHANGE:
                self.values[buffer] = _poisoned(spec)
                if spec.dtype == "bfloat16":
                    self.rounded.add(buffer)
                shape = spec.shape[: _REGION_DIMENSIONS.get(buffer, 1)]
                self._regions[buffer] = Regions(
                    buffer.name,
                    shape,
                    clocks,
                    between=buffer is Buffer.X,
                    summed=buffer is Buffer.HISTOGRAM,
                )
        self.values[Buffer.HISTOGRAM][:] = 0  # the host's part; from then on SAMPLE_COMMIT clears it

    def read(self, buffer: Buffer, index: Index, by: Toucher) -> Array:
        """A copy of the regions at `index`."""
        self._regions[buffer].read(index, by)
        return np.array(self.values[buffer][index])

    def write(self, buffer: Buffer, index: Index, values: Array, by: Toucher) -> None:
        """Replace the regions at `index`."""
        self._regions[buffer].write(index, by)
        self.values[buffer][index] = values

    def add(self, buffer: Buffer, index: Index, values: Array, by: Toucher) -> None:
        """Integer addition, exact in any order."""
        self._regions[buffer].add(index, by)
        self.values[buffer][index] += values

    def clear(self, buffer: Buffer, index: Index, by: Toucher) -> None:
        """Zero for the next step."""
        self._regions[buffer].write(index, by)
        self.values[buffer][index] = 0


def _tuple(index: Index) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _poisoned(spec: BufferSpec) -> Array:
    kind = _TYPES[spec.dtype]
    if np.issubdtype(kind, np.floating):
        return np.full(spec.shape, np.nan, dtype=kind)
    return np.full(spec.shape, POISON, dtype=np.int64).astype(kind)


class KVPages:
    """The cache's pages, with a tag for each piece that a task writes: 8 elements of a token's key or value.

    The tag is the agent and its clock for what was written in this launch. Unlike exchange buffers, pages are
    not published by the next signal: an SM's writes are its own until SAMPLE_COMMIT makes them visible.
    """

    def __init__(self, cache: KVCache, clocks: Clocks) -> None:
        self._cache = cache
        self._clocks = clocks
        page = cache.pages[0].shape[-1]
        places = torch.arange(page)
        # Where in a page each element of each token lies, [BLOCK_TOKENS, head_dim]: K, then V.
        self._places = (keys_of(places), values_of(places))
        self._tiles = page // BLOCK_TOKENS // TILE_ROWS
        self._tags: dict[PagePlace, tuple[Array, Array]] = {}
        self._unpublished: dict[int, list[tuple[Array, Index]]] = {}

    def begin_launch(self) -> None:
        """What was there before belongs to the host, and all know of it."""
        self._tags.clear()
        self._unpublished.clear()

    def publish(self, by: Toucher) -> None:
        """From its next signal on, an agent's writes are there for all who know of the signal."""
        for clock, index in self._unpublished.pop(by.agent, []):
            clock[index] = self._clocks.now(by.agent)

    def read(self, place: PagePlace, tokens: slice, by: Toucher) -> tuple[Floats, Floats]:
        """Keys and values of a block, each [BLOCK_TOKENS, head_dim], as they are in memory now.

        Raises HazardError if one of `tokens`, the ones that will be used, was written in this launch and not
        published to the reader.
        """
        layer, block, head = place
        if place in self._tags:
            writer, clock = (tag[tokens] for tag in self._tags[place])
            unseen = clock > self._clocks.knowledge[by.agent][writer]
            if unseen.any():
                token = tokens.start + int(np.argmax(unseen.any(axis=-1)))
                raise HazardError(
                    f"{by.task} reads what its counters have not published to it: KV_PAGES of layer {layer}, "
                    f"block {block}, KV head {head}, token {token}"
                )
        pages = self._cache.pages[layer][block, head]
        return keys_of(pages[0]).float().numpy().copy(), values_of(pages[1]).float().numpy().copy()

    def write(
        self,
        place: PagePlace,
        token: int,
        part: int,
        tiles: npt.NDArray[np.int64],
        values: Floats,
        by: Toucher,
    ) -> None:
        """Store tiles of 8 elements of a token's key (part 0) or value (part 1): values [tiles * 8]."""
        layer, block, head = place
        page = self._cache.pages[layer][block, head, part]
        elements = (tiles[:, None] * TILE_ROWS + np.arange(TILE_ROWS)).reshape(-1)
        where = self._places[part][token, torch.from_numpy(elements)]
        page[where] = torch.from_numpy(values).to(page.dtype)
        if place not in self._tags:
            shape = (BLOCK_TOKENS, 2 * self._tiles)
            self._tags[place] = np.full(shape, self._clocks.host), np.zeros(shape, dtype=np.int32)
        writer, clock = self._tags[place]
        pieces = part * self._tiles + tiles
        writer[token, pieces] = by.agent
        clock[token, pieces] = np.iinfo(np.int32).max
        self._unpublished.setdefault(by.agent, []).append((clock, (token, pieces)))
