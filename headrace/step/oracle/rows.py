"""The rows of a launch: what the host says of each, and what every SM keeps of them while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.model.constraint import Mask
from headrace.model.kv import BlockTables
from headrace.model.sampler import NO_TOKEN
from headrace.model.sampling import SamplingParams

NO_STOPS: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRow:
    """One row: feed `token` at `position` of the sequence in `slot`, and sample what follows.

    `tables` cover every visible position up to position + steps - 1. `prompt` and `output` are the tokens
    up to and including this one, for the penalties. The row ends after `max_tokens` tokens or one of
    `stop_token_ids`. `allowed` holds the tokens that a grammar allows; such a row takes one step a launch.
    """

    slot: int
    token: int
    position: int
    tables: BlockTables
    params: SamplingParams
    seed: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    max_tokens: int = 1 << 30
    stop_token_ids: frozenset[int] = NO_STOPS
    allowed: Mask | None = None


@dataclass(slots=True)
class RowState:
    """One SM's copy of a row's state (ROW_STATE): what SAMPLE_COMMIT moves on."""

    row: LaunchRow
    token: int
    position: int
    active: bool = True
    made: list[int] = field(default_factory=list)

    @staticmethod
    def of(row: LaunchRow) -> RowState:
        return RowState(row, row.token, row.position)

    def commit(self, token: int) -> None:
        """Take the token that was sampled: feed it next, or end."""
        self.made.append(token)
        self.token = token
        self.position += 1
        if token == NO_TOKEN or len(self.made) >= self.row.max_tokens or token in self.row.stop_token_ids:
            self.active = False


@dataclass(slots=True)
class RowStates:
    """One SM's copy of all rows, by their place in the launch; None: a place without a row."""

    rows: list[RowState | None]

    @staticmethod
    def of(rows: Sequence[LaunchRow | None], capacity: int) -> RowStates:
        states: list[RowState | None] = [None if row is None else RowState.of(row) for row in rows]
        return RowStates(states + [None] * (capacity - len(states)))

    def active(self) -> dict[int, RowState]:
        """The rows that take part in the step."""
        return {index: state for index, state in enumerate(self.rows) if state is not None and state.active}

    def positions(self) -> list[int | None]:
        """Position of every place, None where no row is active."""
        live = self.active()
        return [live[index].position if index in live else None for index in range(len(self.rows))]

    def first_new(self, slot: int) -> int:
        """The lowest position that this step writes in a slot: keys from there on are not yet in pages."""
        return min(state.position for state in self.active().values() if state.row.slot == slot)

    def writers(self, slot: int, upto: int) -> dict[int, int]:
        """Which row writes a position of the slot in this step, row by position, up to a position."""
        return {
            state.position: index
            for index, state in self.active().items()
            if state.row.slot == slot and state.position <= upto
        }
