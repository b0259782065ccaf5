"""Log-probabilities of a prompt's own tokens, for requests that ask for them (`prompt_logprobs`).

They come from the passes that fill the prompt's KV, so such a request does not go on after a cached prefix.
Each of these passes runs all of its layers at once: others wait for its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from headrace.engine.request import Request
from headrace.model.batch import Span
from headrace.model.sampling import TokenLogprobs


@runtime_checkable
class Scorer(Protocol):
    """A prefiller that can also say how likely a prompt was."""

    def score(self, chunk: Span, following: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Fill the KV of a chunk. The log-probabilities of `following`, which are the tokens after each of
        the first len(following) tokens of the chunk, and of the `count` most likely ones in their places."""


def score_chunk(scorer: Scorer, chunk: Span, request: Request) -> bool:
    """Fill the KV of a chunk, and keep the scores of the prompt's tokens that had none yet.

    After a preemption all comes by once more. False if the scores are no numbers.
    """
    count = request.params.prompt_logprobs
    assert count is not None
    following = request.prompt[chunk.start + 1 : chunk.end + 1]
    new = scorer.score(chunk, following, count)[len(request.prompt_logprobs) - chunk.start :]
    request.prompt_logprobs += new
    return not any(math.isnan(entry.logprob) for entry in new)
