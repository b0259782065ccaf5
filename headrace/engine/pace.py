"""How much prompt a step may take in while others wait for their next token.

What a token of prompt costs depends on the machine, the model and how far into its prompt a sequence is, so
it is learnt from the steps as they run.
"""

from __future__ import annotations

FEWEST = 64  # tokens that a step takes in whatever the bound says, so that every prompt gets done
_WEIGHT = 0.3  # of the newest measurement
_GROWTH = 2  # at most so many times the last chunk: a first guess must not be far off


class Pace:
    """Sizes the prompt chunks of a step so that a stream waits about `gap` seconds between tokens at most.

    `most` bounds a chunk in any case. Times are those of whole steps: a step of decoding alone, and what a
    chunk adds to it.
    """

    def __init__(self, *, most: int, gap: float) -> None:
        self.most = most
        self.gap = gap
        self._decode = 0.0  # seconds of a decode step
        self._token: float | None = None  # seconds that a token of prompt adds
        self._last = FEWEST

    def tokens(self, *, streams: int) -> int:
        """How many tokens of prompt the next step may take in beside `streams` decoding sequences."""
        if not streams:
            return self.most
        if self._token is None:
            return min(FEWEST, self.most)
        fitting = int((self.gap - self._decode) / self._token) if self._token else self.most
        return max(1, min(self.most, max(FEWEST, min(fitting, _GROWTH * self._last))))

    def observe(self, *, prompt_tokens: int, prefill: float, decode: float, steps: int) -> None:
        """Learn from a call: `prefill` seconds for its chunks, `decode` seconds for `steps` decode steps."""
        if steps:
            self._decode += _WEIGHT * (decode / steps - self._decode)
        if prompt_tokens:
            cost = prefill / prompt_tokens
            self._token = cost if self._token is None else self._token + _WEIGHT * (cost - self._token)
            self._last = max(prompt_tokens, FEWEST)
