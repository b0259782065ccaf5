"""How much prompt a step may take in while others wait for their next token, and in what way.

What a chunk of a prompt costs depends on the machine, the model and how far into its prompt a sequence is, so
it is learnt from the steps as they run: so much for every token, and so much for the chunk itself, as all
weights are read for it. So is what a decode step costs by its rows: a short piece of prompt may be cheaper in
the rows of a few steps than in a chunk.

A measurement may be far off, because something had to be loaded, planned or allocated first. So all costs
are medians, and chunks of different sizes are kept in sight: where all are alike, what a chunk costs by
itself and what its tokens do cannot be told apart, and a wrong guess would confirm itself for ever.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from headrace.engine.filling import Filling
from headrace.engine.line import Line
from headrace.engine.part_costs import PartCosts
from headrace.model.tiled import TILE

FEWEST = 64  # tokens that a step takes in whatever the bound says, so that every prompt gets done
_GROWTH = 2  # at most so many times the largest chunk so far: a first guess must not be far off
_STEPS = 5  # the newest of so many rows
# How much of a chunk's cost may be its own, and not its tokens': else it is made larger than the bound says.
_OWN = 0.5
_OWN_LAYERED = 0.25  # where its layers are run in several steps, and no other prompt waits for its end
_DOUBT = 0.02  # of what a step costs is forgotten whenever a piece does not ride because of it
_LONGEST = 0.5  # seconds of a pass that nobody has to wait for: a request may come while it runs
_ENOUGH = 8192  # tokens that share a pass well: no chunk has to be larger, or is made smaller for _LONGEST
_LONGEST_RIDE = 16  # steps: whatever a chunk is thought to cost, longer pieces are no short ones


class Pace:
    """Sizes the prompt chunks of a step so that a stream waits about `gap` seconds between tokens at most.

    A chunk is as large as the bound allows a step, and larger where it alone costs so much that this would
    leave little time for its tokens. Where chunks are `layered`, a step runs as many of a chunk's layers as
    the bound allows, and a large chunk only keeps other prompts waiting; else the streams wait longer. In any
    case a step has as much time for prompts as for decoding. Where nobody decodes, `most` bounds a chunk, and
    so does what a request that comes meanwhile would have to wait. Times are those of whole steps: a step of
    decoding alone, and what a chunk adds to it.
    """

    def __init__(self, *, most: int, gap: float, layered: bool = False) -> None:
        self.most = most
        self.gap = gap
        self.layered = layered
        self._steps = StepCosts()
        self._cost = Line()
        self._parts = PartCosts()
        self._largest = FEWEST

    def __str__(self) -> str:
        """What has been learnt, for the log."""
        steps = ", ".join(
            f"{rows} rows {1e3 * seconds:.1f} ms" for rows, seconds in self._steps.known.items()
        )
        chunk = f"{1e3 * self._cost.fixed:.1f} ms and {1e6 * self._cost.slope:.1f} us a token"
        return f"Learnt: a chunk {chunk}, {self._parts}; steps of {steps}"

    def tokens(self, *, streams: int, prompts: int = 1) -> int:
        """How many tokens of so many prompts the next step may begin with beside `streams` decoding ones."""
        if not streams:
            return self.most
        most = min(self.most, _ENOUGH)  # other prompts would wait longer for the end of a larger one
        if not self._cost.known:
            return min(FEWEST, most)
        own = _OWN_LAYERED if self.layered and prompts == 1 else _OWN
        wanted = min(self._wanted(streams, own), _GROWTH * self._largest)
        if self._cost.alike:  # twice as large costs the streams nothing where only some layers run in a step
            wanted = wanted * 2 if self.layered else wanted // 2
        return max(1, min(most, max(FEWEST, wanted)))

    def bearable(self, *, streams: int, past: int) -> int:
        """How many tokens after a `past` of so many a chunk may have for any layer of it to fit into a step:
        one that sees all of a long past may take longer than the bound by itself. Where nobody decodes, all
        layers are run at once: see `_uninterrupted`.
        """
        fixed, slope = self._cost.fixed, self._cost.slope
        if not slope:
            return self.most
        if not streams:
            return self._uninterrupted(past)
        if not self.layered:
            return self.most
        fitting = self._parts.tokens(room=self._room(streams), past=past, fixed=fixed, slope=slope)
        return self.most if fitting >= self.most else max(FEWEST, int(fitting))

    def _uninterrupted(self, past: int) -> int:
        """How many tokens after a `past` of so many a chunk may have to take _LONGEST at most, or _ENOUGH and
        what is left of the last tile."""
        fixed, slope = self._cost.fixed, self._cost.slope
        fitting = self._parts.of_pass(seconds=_LONGEST, past=past, fixed=fixed, slope=slope)
        if fitting >= self.most:
            return self.most
        end = max((past + int(fitting)) // TILE, -(-(past + _ENOUGH) // TILE)) * TILE
        return min(self.most, end - past)

    def layers(self, filling: Filling, *, rows: int) -> int:
        """How many of a pass's next layers may run before a step of `rows` rows."""
        if not rows:
            return filling.left
        layer = self._cost.of(filling.tokens) / len(filling.full)
        return self._parts.fitting(filling, room=self._room(rows), layer=layer)

    def rides(self, tokens: int, *, streams: int, free: int, wait: float = 0.0) -> bool:
        """Whether `tokens` of prompts had better be fed in decode rows than in a chunk: up to `free` rows a
        step, beside those of `streams` decoding sequences. A chunk could begin in `wait` seconds.

        They had where they are there no later than by a chunk and the step that runs after it. Then the
        streams gain as well: each of these steps brings them a token, and a chunk none. As long as one of the
        costs is not known, they ride if one step takes them all: so that of the step becomes known.
        """
        if free < 1:
            return False
        steps, rows = -(-tokens // free), streams + min(tokens, free)
        full = self._steps.at_most(rows)
        if steps > _LONGEST_RIDE:
            return False
        if full is None or not self._cost.parted or (steps == 1 and rows not in self._steps):
            return steps == 1
        bare = self._steps.near(streams) if streams else 0.0
        if steps * full <= wait + self._cost.of(tokens) + bare:
            return True
        if steps == 1:
            self._steps.doubt(rows)
        return False

    def observe_part(self, filling: Filling) -> float:
        """Learn from the part of a pass that was run last. Gives a complete pass's seconds for `observe`,
        less what its past cost: what grows along a prompt would be taken for the cost of tokens."""
        self._parts.observe(filling)
        return self._parts.bare(filling)

    def observe(self, *, prompt_tokens: int, prefill: float, decode: float, steps: int, rows: int) -> None:
        """Learn from a call: `prefill` seconds for its chunks, `decode` seconds for `steps` decode steps of
        `rows` rows."""
        if steps:
            self._steps.observe(rows, decode / steps)
        if prompt_tokens:
            self._cost.observe(prompt_tokens, prefill)
            self._largest = max(self._largest, prompt_tokens)

    def _wanted(self, streams: int, own: float) -> int:
        fixed, slope = self._cost.fixed, self._cost.slope
        if not slope:
            return self.most
        fitting = int((self._room(streams) - fixed) / slope)
        if fitting < FEWEST and not self._cost.parted:
            return _GROWTH * self._largest  # once, to see what of the cost is the chunk's own
        return max(fitting, int(fixed * (1 - own) / own / slope))

    def _room(self, rows: int) -> float:
        """Seconds for prompts before a step of so many rows."""
        step = self._steps.near(rows)
        return max(self.gap - step, step)


class StepCosts:
    """Seconds of a decode step by its rows. These count up to the next power of two, as kernels are made."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}  # by the exponent

    @property
    def known(self) -> dict[int, float]:
        """Seconds by rows, as far as these have been seen."""
        return {1 << exponent: median(newest) for exponent, newest in sorted(self._newest.items())}

    def __contains__(self, rows: int) -> bool:
        """Whether there has been a step of so many rows."""
        return _exponent(rows) in self._newest

    def at_most(self, rows: int) -> float | None:
        """What a step of so many rows costs, or before the first as much for each row as with fewer."""
        wanted = _exponent(rows)
        known = max((exponent for exponent in self._newest if exponent <= wanted), default=None)
        return None if known is None else median(self._newest[known]) * 2 ** (wanted - known)

    def near(self, rows: int) -> float:
        """What the steps cost that have most nearly so many rows; 0 before the first."""
        wanted = _exponent(rows)
        known = min(self._newest, key=lambda exponent: abs(exponent - wanted), default=None)
        return 0.0 if known is None else median(self._newest[known])

    def observe(self, rows: int, seconds: float) -> None:
        self._newest.setdefault(_exponent(rows), deque(maxlen=_STEPS)).append(seconds)

    def doubt(self, rows: int) -> None:
        """Trust a cost a little less: it keeps such steps from being run, and may have been an accident."""
        newest = self._newest[_exponent(rows)]
        newest.extend([seconds * (1 - _DOUBT) for seconds in newest])


def _exponent(rows: int) -> int:
    return (rows - 1).bit_length()
