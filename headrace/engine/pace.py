"""How much prompt a step may take in while others wait for their next token, and in what way.

What a chunk of a prompt costs depends on the machine, the model and how far into its prompt a sequence is, so
it is learnt from the steps as they run: so much for every token, and so much for the chunk itself, as all
weights are read for it. So is what a decode step costs by its rows: a short piece of prompt may be cheaper in
the rows of a few steps than in a chunk.
"""

from __future__ import annotations

FEWEST = 64  # tokens that a step takes in whatever the bound says, so that every prompt gets done
_WEIGHT = 0.3  # of the newest measurement
_GROWTH = 2  # at most so many times the largest chunk so far: a first guess must not be far off
_SPREAD = 0.1  # sizes of chunks must differ so much, as a share of their mean, to tell the two costs apart
_FLATTEST = 0.1  # a token costs this share of its part in a chunk at least, whatever noise says
# How much of a chunk's cost may be its own, and not its tokens': else it is made larger than the bound says.
_OWN = 0.5
_OWN_LAYERED = 0.25  # where its layers are run in several steps, and no other prompt waits for its end
_DOUBT = 0.02  # of what a step costs is forgotten whenever a piece does not ride because of it


class Pace:
    """Sizes the prompt chunks of a step so that a stream waits about `gap` seconds between tokens at most.

    A chunk is as large as the bound allows a step, and larger where it alone costs so much that this would
    leave little time for its tokens. Where chunks are `layered`, a step runs as many of a chunk's layers as
    the bound allows, and a large chunk only keeps other prompts waiting; else the streams wait longer. In any
    case a step has as much time for prompts as for decoding, and `most` bounds a chunk. Times are those of
    whole steps: a step of decoding alone, and what a chunk adds to it.
    """

    def __init__(self, *, most: int, gap: float, layered: bool = False) -> None:
        self.most = most
        self.gap = gap
        self.layered = layered
        self._steps = StepCosts()
        self._cost = Line()
        self._largest = FEWEST

    def tokens(self, *, streams: int, prompts: int = 1) -> int:
        """How many tokens of so many prompts the next step may begin with beside `streams` decoding ones."""
        if not streams:
            return self.most
        if not self._cost.known:
            return min(FEWEST, self.most)
        own = _OWN_LAYERED if self.layered and prompts == 1 else _OWN
        wanted = min(self._wanted(streams, own), _GROWTH * self._largest)
        return max(1, min(self.most, max(FEWEST, wanted)))

    def layers(self, left: int, *, tokens: int, layer: float | None, rows: int) -> int:
        """How many of the `left` layers of a chunk of `tokens` may run before a step of `rows` rows. `layer`
        is what one has taken in seconds, None for a chunk that begins."""
        if layer is None:
            layer = self._cost.of(tokens) / left
        if not rows or not layer:
            return left
        return max(1, min(left, int(self._room(rows) / layer)))

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
        if full is None or not self._cost.parted or (steps == 1 and rows not in self._steps):
            return steps == 1
        bare = self._steps.near(streams) if streams else 0.0
        if steps * full <= wait + self._cost.of(tokens) + bare:
            return True
        if steps == 1:
            self._steps.doubt(rows)
        return False

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
        self._seconds: dict[int, float] = {}  # by the exponent

    def __contains__(self, rows: int) -> bool:
        """Whether there has been a step of so many rows."""
        return _exponent(rows) in self._seconds

    def at_most(self, rows: int) -> float | None:
        """What a step of so many rows costs, or before the first as much for each row as with fewer."""
        wanted = _exponent(rows)
        known = max((exponent for exponent in self._seconds if exponent <= wanted), default=None)
        return None if known is None else self._seconds[known] * 2 ** (wanted - known)

    def near(self, rows: int) -> float:
        """What the steps cost that have most nearly so many rows; 0 before the first."""
        wanted = _exponent(rows)
        known = min(self._seconds, key=lambda exponent: abs(exponent - wanted), default=wanted)
        return self._seconds.get(known, 0.0)

    def observe(self, rows: int, seconds: float) -> None:
        exponent = _exponent(rows)
        known = self._seconds.get(exponent, seconds)
        self._seconds[exponent] = known + _WEIGHT * (seconds - known)

    def doubt(self, rows: int) -> None:
        """Trust a cost a little less: it keeps such steps from being run, and may have been an accident."""
        self._seconds[_exponent(rows)] *= 1 - _DOUBT


def _exponent(rows: int) -> int:
    return (rows - 1).bit_length()


class Line:
    """seconds = fixed + slope * tokens, fitted to the newest chunks."""

    def __init__(self) -> None:
        self.fixed = self.slope = 0.0
        self.known = False  # whether a chunk has been seen
        self.parted = False  # whether chunks of different sizes have been
        self._mean_tokens = self._mean_seconds = self._variance = self._covariance = 0.0

    def of(self, tokens: int) -> float:
        """What a chunk of so many tokens costs."""
        return self.fixed + self.slope * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        if not self.known:
            self.known, self.slope = True, seconds / tokens
            self._mean_tokens, self._mean_seconds = tokens, seconds
            return
        more, longer = tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += _WEIGHT * more
        self._mean_seconds += _WEIGHT * longer
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * more * more)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * more * longer)
        if self._variance > (_SPREAD * self._mean_tokens) ** 2:
            self.parted = True
            whole = self._mean_seconds / self._mean_tokens
            self.slope = min(max(self._covariance / self._variance, _FLATTEST * whole), whole)
            self.fixed = self._mean_seconds - self.slope * self._mean_tokens
        elif guess := self.of(tokens):
            # Alike as they are, chunks only tell that both costs have changed.
            factor = 1 + _WEIGHT * (seconds / guess - 1)
            self.fixed, self.slope = self.fixed * factor, self.slope * factor
