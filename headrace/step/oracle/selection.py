"""What one SM knows while it samples a row: its own tokens, and the borders of top_k and top_p.

A border is the score at which the count (top_k) or the weight (top_p) of the tokens from the top reaches what
is needed. It is found digit by digit from the highest, in histograms over all SMs: a radix select.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.model.constraint import forbidden
from headrace.step.isa import DIGIT_BINS, DIGIT_BITS, DIGITS
from headrace.step.oracle.arithmetic import Floats
from headrace.step.oracle.exponential import exponential
from headrace.step.oracle.rows import RowState

Keys = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.uint64]

WEIGHT_ONE = 2.0**44  # the weight of the most likely token


@dataclass(slots=True)
class Border:
    """The search for one border: the digits found so far and what lies above them."""

    needed: int
    above: int = 0
    prefix: int = 0
    digits: int = 0

    def inside(self, keys: Keys) -> Mask:
        """The keys that begin with the digits found so far."""
        if not self.digits:
            return np.ones(keys.shape, dtype=np.bool_)
        return np.asarray((keys >> np.uint32(32 - DIGIT_BITS * self.digits)) == self.prefix)

    def next_digits(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The digit after those found, of every key."""
        shift = np.uint32(32 - DIGIT_BITS * (self.digits + 1))
        return ((keys >> shift) & np.uint32(DIGIT_BINS - 1)).astype(np.int64)

    def settle(self, histogram: Weights) -> None:
        """Find the next digit: the one where the sum from the top reaches what is needed.

        Raises ValueError if it never does.
        """
        for digit in range(DIGIT_BINS - 1, -1, -1):
            amount = int(histogram[digit])
            if self.above + amount >= self.needed:
                self.prefix = (self.prefix << DIGIT_BITS) | digit
                self.digits += 1
                return
            self.above += amount
        raise ValueError(f"adds up to {self.above}, but {self.needed} is needed")


@dataclass(slots=True)
class Selection:
    """One row on one SM, over the SM's own tokens (`ids`, ascending)."""

    ids: npt.NDArray[np.int64]
    raw: Floats
    adjusted: Floats
    scores: Floats | None = None
    keys: Keys | None = None
    left: Mask | None = None
    border: Border | None = None
    weights: Weights | None = field(default=None)

    def score(self, best: np.float32, temperature: float) -> None:
        """Step 3 of sampling, given the largest adjusted logit of the whole vocabulary."""
        # Adding 0 makes -0, which a tiny difference may underflow to, equal to 0 in its bits as well.
        scores = (self.adjusted - best) / np.float32(temperature) + np.float32(0)
        bits = np.ascontiguousarray(scores).view(np.uint32)
        negative = (bits >> np.uint32(31)).astype(np.bool_)
        self.scores = scores
        self.keys = np.where(negative, ~bits, bits | np.uint32(0x80000000)).astype(np.uint32)
        self.left = np.ones(scores.shape, dtype=np.bool_)

    def weigh(self) -> None:
        """Weights of the tokens for top_p."""
        assert self.scores is not None
        self.weights = (exponential(self.scores.astype(np.float64)) * WEIGHT_ONE).astype(np.uint64)

    def count(self, *, weighted: bool) -> Weights:
        """This SM's part of the histogram of the border's next digit."""
        assert self.keys is not None
        assert self.left is not None
        assert self.border is not None
        mask = self.left & self.border.inside(self.keys)
        histogram = np.zeros(DIGIT_BINS, dtype=np.uint64)
        amounts = self.weights if weighted else np.ones(self.keys.shape, dtype=np.uint64)
        assert amounts is not None
        np.add.at(histogram, self.border.next_digits(self.keys)[mask], amounts[mask])
        return histogram

    def ties(self) -> Mask:
        """Own tokens left whose key is the border's."""
        assert self.keys is not None
        assert self.left is not None
        assert self.border is not None
        assert self.border.digits == DIGITS
        return np.asarray(self.left & (self.keys == np.uint32(self.border.prefix)))

    def cut(self, stay: int) -> None:
        """Keep what is above the border, and the first `stay` (0 and less: none) of own tokens at it."""
        assert self.keys is not None
        assert self.left is not None
        assert self.border is not None
        at_border = self.ties()
        kept = at_border & (np.cumsum(at_border) <= stay)
        self.left &= (self.keys > np.uint32(self.border.prefix)) | kept
        self.border = None


def adjusted(raw: Floats, ids: npt.NDArray[np.int64], state: RowState) -> Floats:
    """Raw logits of tokens `ids` (a run of ascending ids) after penalties, bias and the allowed tokens."""
    params = state.row.params
    logits = raw.copy()
    if len(ids) == 0:
        return logits
    first, last = int(ids[0]), int(ids[-1])

    def own(tokens: Counter[int]) -> list[tuple[int, int]]:
        return [(token - first, count) for token, count in tokens.items() if first <= token <= last]

    made = Counter([*state.row.output, *state.made])
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        for place, _ in own(Counter(state.row.prompt) + made):
            logits[place] = logits[place] / penalty if logits[place] > 0 else logits[place] * penalty
    if params.presence_penalty or params.frequency_penalty:
        presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        for place, count in own(made):
            logits[place] = logits[place] - np.float32(count) * frequency - presence
    for token, bias in params.logit_bias.items():
        if first <= token <= last:
            logits[token - first] += np.float32(bias)
    if state.row.allowed is not None:
        logits[forbidden(state.row.allowed, last + 1)[first:].numpy()] = -np.inf
    return logits
