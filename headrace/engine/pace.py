"""How much prompt a step may take in while others wait for their next token.

What a chunk of a prompt costs depends on the machine, the model and how far into its prompt a sequence is, so
it is learnt from the steps as they run: so much for every token, and so much for the chunk itself, as all
weights are read for it.
"""

from __future__ import annotations

FEWEST = 64  # tokens that a step takes in whatever the bound says, so that every prompt gets done
_WEIGHT = 0.3  # of the newest measurement
_GROWTH = 2  # at most so many times the largest chunk so far: a first guess must not be far off
_SPREAD = 0.1  # sizes of chunks must differ so much, as a share of their mean, to tell the two costs apart
_FLATTEST = 0.1  # a token costs this share of its part in a chunk at least, whatever noise says


class Pace:
    """Sizes the prompt chunks of a step so that a stream waits about `gap` seconds between tokens at most.

    It waits longer where a chunk alone costs so much that the bound would leave little time for tokens: these
    then get as much as the chunk itself. `most` bounds a chunk in any case. Times are those of whole steps: a
    step of decoding alone, and what a chunk adds to it.
    """

    def __init__(self, *, most: int, gap: float) -> None:
        self.most = most
        self.gap = gap
        self._decode = 0.0  # seconds of a decode step
        self._cost = Line()
        self._largest = FEWEST

    def tokens(self, *, streams: int) -> int:
        """How many tokens of prompt the next step may take in beside `streams` decoding sequences."""
        if not streams:
            return self.most
        if not self._cost.known:
            return min(FEWEST, self.most)
        return max(1, min(self.most, max(FEWEST, min(self._wanted(), _GROWTH * self._largest))))

    def observe(self, *, prompt_tokens: int, prefill: float, decode: float, steps: int) -> None:
        """Learn from a call: `prefill` seconds for its chunks, `decode` seconds for `steps` decode steps."""
        if steps:
            self._decode += _WEIGHT * (decode / steps - self._decode)
        if prompt_tokens:
            self._cost.observe(prompt_tokens, prefill)
            self._largest = max(self._largest, prompt_tokens)

    def _wanted(self) -> int:
        fixed, slope = self._cost.fixed, self._cost.slope
        if not slope:
            return self.most
        fitting = int((self.gap - self._decode - fixed) / slope)
        if fitting < FEWEST and not self._cost.parted:
            return _GROWTH * self._largest  # once, to see what of the cost is the chunk's own
        return max(fitting, int(fixed / slope))


class Line:
    """seconds = fixed + slope * tokens, fitted to the newest chunks."""

    def __init__(self) -> None:
        self.fixed = self.slope = 0.0
        self.known = False  # whether a chunk has been seen
        self.parted = False  # whether chunks of different sizes have been
        self._mean_tokens = self._mean_seconds = self._variance = self._covariance = 0.0

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
        elif guess := self.fixed + self.slope * tokens:
            # Alike as they are, chunks only tell that both costs have changed.
            factor = 1 + _WEIGHT * (seconds / guess - 1)
            self.fixed, self.slope = self.fixed * factor, self.slope * factor
