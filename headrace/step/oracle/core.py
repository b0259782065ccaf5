"""What a task works with: its descriptor, the SM it runs on, and memory as its agent may see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from headrace.model.config import KVGroup, ModelConfig
from headrace.model.kv import BLOCK_TOKENS
from headrace.model.rope import frequencies
from headrace.model.sampler import Sampled
from headrace.step.isa import TILE_ROWS, Buffer, Field, Opcode
from headrace.step.oracle.arithmetic import Floats, Rounding, normalized
from headrace.step.oracle.errors import HazardError
from headrace.step.oracle.memory import Array, Exchange, Index, KVPages, Regions, Toucher
from headrace.step.oracle.rows import RowState, RowStates
from headrace.step.oracle.selection import Selection
from headrace.step.oracle.weights import WeightPages
from headrace.step.sizes import Sizes

Tiles = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Machine:
    """What all SMs share."""

    sizes: Sizes
    rounding: Rounding
    weights: WeightPages
    exchange: Exchange
    kv: KVPages
    row_state: Regions
    frequencies: Floats

    @staticmethod
    def rotary(config: ModelConfig) -> Floats:
        """Radians per position of every pair."""
        table: Floats = frequencies(config, torch.device("cpu")).numpy()
        return table


@dataclass(slots=True)
class PrivateTiles:
    """Tiles that only one SM touches: float32 [tiles, R, 8] from tile `first` on."""

    first: int
    values: Floats


@dataclass(slots=True)
class Core:
    """The private state of one SM: ROW_STATE, RESIDUAL, LOGITS, and what sampling found so far."""

    sm: int
    states: RowStates
    residual: PrivateTiles | None = None
    logits: PrivateTiles | None = None
    selections: dict[int, Selection] = field(default_factory=dict)
    finished: bool = False


@dataclass(slots=True)
class Launch:
    """What host and SMs exchange while a launch runs: its last step, the stop flag, the tokens made."""

    last: int
    stop: Callable[[], bool]
    ring: list[list[Sampled | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """A descriptor in the hands of an agent: fields, and every access that the operation may make."""

    words: tuple[int, ...]
    machine: Machine
    core: Core
    launch: Launch
    agent: int
    epoch: int

    def __getitem__(self, name: Field) -> int:
        return self.words[name]

    @property
    def opcode(self) -> Opcode:
        return Opcode(self[Field.OPCODE])

    @property
    def sizes(self) -> Sizes:
        return self.machine.sizes

    def __str__(self) -> str:
        who = "consumer" if self.agent % 2 else "loader"
        return (
            f"{self.opcode.name} of layer {self[Field.LAYER]} on SM {self.core.sm} ({who}, step {self.epoch})"
        )

    @property
    def tiles(self) -> slice:
        """The task's output tiles."""
        first = self[Field.FIRST_TILE]
        return slice(first, first + self[Field.TILE_COUNT])

    @property
    def elements(self) -> range:
        """The elements of the task's output tiles."""
        return range(self.tiles.start * TILE_ROWS, self.tiles.stop * TILE_ROWS)

    def _toucher(self) -> Toucher:
        return Toucher(self.agent, self.epoch, self[Field.LAYER], self[Field.OPCODE], self)

    def states(self) -> dict[int, RowState]:
        """The active rows, as this SM's own copy of ROW_STATE has them."""
        self.machine.row_state.read((self.core.sm,), self._toucher(), lasting=True)
        return self.core.states.active()

    def all_states(self) -> RowStates:
        self.machine.row_state.read((self.core.sm,), self._toucher(), lasting=True)
        return self.core.states

    def change_states(self) -> RowStates:
        """For SAMPLE_COMMIT."""
        self.machine.row_state.write((self.core.sm,), self._toucher())
        return self.core.states

    def read(self, buffer: Buffer, index: Index) -> Array:
        """A copy of regions of an exchange buffer."""
        return self.machine.exchange.read(buffer, index, self._toucher())

    def write(self, buffer: Buffer, index: Index, values: Array) -> None:
        """Publish regions of an exchange buffer, rounded to its type."""
        if buffer in self.machine.exchange.rounded:
            values = self.machine.rounding.apply(values)
        self.machine.exchange.write(buffer, index, values, self._toucher())

    def add(self, buffer: Buffer, index: Index, values: Array) -> None:
        self.machine.exchange.add(buffer, index, values, self._toucher())

    def clear(self, buffer: Buffer, index: Index) -> None:
        self.machine.exchange.clear(buffer, index, self._toucher())

    def read_rows(self, buffer: Buffer, tiles: slice, rows: list[int]) -> Floats:
        """Tiles of a tile-major buffer, by row: [len(rows), tiles * 8]."""
        values = self.read(buffer, tiles)[:, rows]
        return np.ascontiguousarray(values.swapaxes(0, 1)).reshape(len(rows), -1)

    def tiled(self, rows: list[int], values: Floats) -> Floats:
        """Results [len(rows), tiles * 8] in tile-major order, [tiles, R, 8]; absent rows are poison."""
        out = np.full((values.shape[1] // TILE_ROWS, self.sizes.rows, TILE_ROWS), np.nan, dtype=np.float32)
        out[:, rows] = values.reshape(len(rows), -1, TILE_ROWS).swapaxes(0, 1)
        return out

    def write_rows(self, buffer: Buffer, tiles: Index, rows: list[int], values: Floats) -> None:
        """Publish results [len(rows), tiles * 8] in tile-major order."""
        self.write(buffer, tiles, self.tiled(rows, values))

    def normalized(self, rows: list[int]) -> Floats:
        """norm(X) of rows: [len(rows), hidden]."""
        x = self.read_rows(Buffer(self[Field.INPUT]), slice(0, self.sizes.residual_tiles), rows)
        weight = self.machine.weights.norms[self[Field.NORM]]
        return self.machine.rounding.apply(normalized(x, weight, self.sizes.norm, self.sizes.norm_eps))

    def weight_rows(self, *, tile_rows: int = TILE_ROWS, tiles: int | None = None, extra: int = 0) -> Floats:
        """The weights of the task's tiles, [tiles * tile_rows, K], `extra` units after WEIGHTS."""
        count = (self[Field.TILE_COUNT] if tiles is None else tiles) * (tile_rows // TILE_ROWS)
        return self.machine.weights.rows(self[Field.WEIGHTS] + extra, count, self[Field.K])

    def residual(self) -> Floats:
        """This SM's residual tiles of the task, a view: [tiles, R, 8]."""
        held = self.core.residual
        if held is None:
            raise HazardError(f"{self} reads RESIDUAL, which nobody has written in this step")
        low, high = self.tiles.start - held.first, self.tiles.stop - held.first
        if low < 0 or high > len(held.values):
            raise HazardError(
                f"{self} reads RESIDUAL[{self.tiles.start}..{self.tiles.stop - 1}], but this SM "
                f"owns tiles {held.first}..{held.first + len(held.values) - 1}"
            )
        return held.values[low:high]

    def add_residual(self, rows: list[int], values: Floats) -> None:
        """Add results [len(rows), tiles * 8] to the residual; publish X where OUTPUT says so."""
        residual = self.residual()
        residual[:, rows] += values.reshape(len(rows), -1, TILE_ROWS).swapaxes(0, 1)
        if self[Field.OUTPUT] == Buffer.X:
            self.write(Buffer.X, self.tiles, residual)

    @property
    def group(self) -> KVGroup:
        """Whose block table the task goes by."""
        return KVGroup.SLIDING if self[Field.WINDOW] else KVGroup.FULL

    def fetch_pages(self, block: int, head: int, tokens: slice) -> tuple[Floats, Floats]:
        """Keys and values of a block as they are in memory now; `tokens` are those that will be used."""
        return self.machine.kv.read((self[Field.LAYER], block, head), tokens, self._toucher())

    def store_token(self, state: RowState, part: int, tiles: Tiles, values: Floats) -> None:
        """Write tiles of the key (part 0) or value (part 1) of a row's token into its page."""
        block = state.row.tables[self.group][state.position // BLOCK_TOKENS]
        place = (self[Field.LAYER], block, self[Field.KV_HEAD])
        offset = state.position % BLOCK_TOKENS
        self.machine.kv.write(place, offset, part, tiles, values, self._toucher())

    def publish_pages(self) -> None:
        """For SAMPLE_COMMIT: make what this SM wrote into pages visible to all."""
        self.machine.kv.publish(self._toucher())
