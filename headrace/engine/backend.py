"""The seam: what the engine asks of whatever runs the model.

A step has two kinds of work. A prompt chunk fills KV and gives nothing back (`Prefiller`). A decode row
feeds one token of one sequence, whose KV up to there exists, and gives the tokens that follow
(`DecodeBackend`). The last token of a prompt is fed as a decode row, so that all sampling happens in one
place. Where a backend takes several rows of one sequence, short pieces of prompt are fed as rows, too, and
what follows them is not looked at.

All calls come from the engine's thread. One call of `run` takes several steps and hands the tokens over as
they are made: the backend feeds each row its own new token, stops rows that ended, and leaves off at the end
of a step when `interrupt` is set. Blocks that a running call can read stay allocated until it is exhausted.

A row whose logits are no numbers gives NO_TOKEN, is over, and touches no other row. What it leaves in its
blocks may be no numbers either: nobody may read what was not written since the block was handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.model.batch import Span
from headrace.model.constraint import Constraint
from headrace.model.kv import BlockTables
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import SamplingParams


class Interrupt(Protocol):
    """A flag that another thread may set; `threading.Event` is one."""

    def is_set(self) -> bool: ...


@dataclass(eq=False, slots=True)
class DecodeRow:
    """One row: feed `token` at `position` of a sequence, and sample what follows.

    `tables` cover every visible position up to position + steps - 1. `prompt` and `output` are the sequence's
    own lists (the penalties count them); the engine appends each token to `output` before it asks for the
    next step. The row ends after `max_tokens` tokens, or after one of `stop_token_ids`, which it returns as
    well. Several rows of one sequence stand at consecutive positions, in any order, and their call takes one
    step; each sees the KV that those before it write.
    `seed` is the request's own or the one drawn for it. `slot` numbers the running sequences from 0: a
    backend may keep state of a sequence under it. `constraint` is asked for its mask before each step; by
    then the engine has told it of the token before. A backend that cannot ask between two steps of a call
    ends the call after one.
    """

    slot: int
    token: int
    position: int
    tables: BlockTables
    prompt: Sequence[int]
    output: Sequence[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    constraint: Constraint | None = None

    def ends(self, token: int, made: int) -> bool:
        """Whether the row is over once `token` is the last of `made` tokens."""
        return token == NO_TOKEN or made >= self.max_tokens or token in self.stop_token_ids


def takes_constraints(backend: object) -> bool:
    """Whether a backend applies the masks of constraints; it says so by an attribute of this name."""
    return bool(getattr(backend, "takes_constraints", False))


def takes_several_rows(backend: object) -> bool:
    """Whether a backend takes several rows of one sequence; it says so by an attribute of this name."""
    return bool(getattr(backend, "takes_several_rows", False))


class Prefiller(Protocol):
    """Fills the KV of prompt chunks."""

    def prefill(self, chunks: Sequence[Span]) -> None: ...


@runtime_checkable
class LayeredPrefiller(Prefiller, Protocol):
    """A prefiller that can stop between the `layers` of a pass, for decode steps of other sequences.

    `full` says of every layer whether it sees all of the past: such a layer takes longer behind a long one.
    A last layer that only writes its keys and values is not counted: what others cost would be told by it.
    """

    layers: int
    full: Sequence[bool]

    def begin(self, chunks: Sequence[Span]) -> Callable[[int], None]:
        """A pass over chunks: the function runs the next so many of its layers. It may be left unfinished."""


@runtime_checkable
class Rehearsing(Prefiller, Protocol):
    """A prefiller whose first passes take longer than later ones, unless they are rehearsed."""

    def rehearse(self, *, tokens: int, context: int) -> list[tuple[int, float]]:
        """Have all loaded, planned and allocated that passes need of up to so many tokens, up to the position
        `context`. Gives tokens and seconds of some passes, as they take afterwards.

        To be called by the thread that will run them, and while nobody holds a block.
        """


class DecodeBackend(Protocol):
    """Runs decode rows: at most `max_rows` in one call, at most `max_steps` steps."""

    name: str
    max_rows: int
    max_steps: int

    def prepare(self) -> None:
        """Get ready (compile, pack, allocate), once, before the first `run`."""

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        """Up to `steps` steps, one item each: what every row made, or None where the row had ended."""


@runtime_checkable
class RehearsingSteps(DecodeBackend, Protocol):
    """A decode backend whose first steps take longer than later ones, unless they are rehearsed."""

    def rehearse_steps(self) -> None:
        """Have all loaded and allocated that steps need, of any number of rows and however they are sampled.

        To be called after `prepare`, by the thread that will run them, and while nobody holds a block.
        """
