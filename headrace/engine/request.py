"""A request on its way through the engine, and what comes out of it."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.model.constraint import Constraint
from headrace.model.sampling import SamplingParams, TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended. The first two are what clients see."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"  # the engine failed; `Output.error` says how


class EngineError(Exception):
    """Base of what the engine raises on a request that it cannot take."""


class QueueFullError(EngineError):
    """As many requests wait as the queue holds: try again later."""


class EngineDeadError(EngineError):
    """The engine has ended, by an error or because it was closed; the message says which."""


class PromptError(EngineError):
    """The prompt cannot be fed: it is empty, or holds ids that are no tokens."""


class ScoringError(EngineError):
    """The backend that fills prompts cannot give the log-probabilities of their tokens."""


class ConstraintError(EngineError):
    """The backend that decodes cannot keep to a grammar."""


class ContextLengthError(EngineError):
    """The prompt, or prompt and max_tokens together, are longer than the context.

    `limit` is the context in tokens, `prompt` the prompt's length, `requested` the max_tokens asked for.
    """

    def __init__(self, *, limit: int, prompt: int, requested: int | None) -> None:
        least = 1 if requested is None else requested
        total, unsaid = prompt + least, "at least " if requested is None else ""
        wanted = f"{prompt} in the messages" + (f", {unsaid}{least} in the completion" if least else "")
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
            f"({wanted}). Please reduce the length of the messages or completion."
        )
        self.limit, self.prompt, self.requested = limit, prompt, requested


@dataclass(slots=True)
class Output:
    """What one step added to a request.

    `text` is new text in whole characters; it can lag behind `token_ids` while a character is incomplete or
    could be the start of a stop string. The last output of a request, and no other, has a `finish_reason`.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


OutputSink = Callable[[Output], None]

_ids = itertools.count()


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its continuation. Owned by the engine's thread once it has been submitted.

    `sink` is called on the engine's thread with every Output; it must not block, and what it raises ends the
    engine.
    """

    prompt: list[int]
    params: SamplingParams
    sink: OutputSink
    max_tokens: int  # resolved: never more than what the context leaves
    stop_token_ids: frozenset[int]
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    id: int = field(default_factory=lambda: next(_ids))
    arrival: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens from the second on
    cached_tokens: int = 0  # of the prompt, whose KV was there already
    admitted: float | None = None  # when it first left the queue, on the clock of `arrival`

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to come."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1
