"""What all endpoints share: the model's name, its tokenizer and the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.async_engine import AsyncEngine
from headrace.model.constraint import Constraint
from headrace.model.sampling import SamplingParams
from headrace.model.tokenizer import TextError, Tokenizer
from headrace.server.errors import ApiError, bad_request, from_exception
from headrace.server.formats import ChatFormat
from headrace.server.generation import Generation
from headrace.server.metrics import Metrics
from headrace.server.record import note_submitted
from headrace.server.structure import Grammars


@dataclass(frozen=True)
class ServerState:
    """One served model.

    `vocab_size` is the model's: the ids below it have an embedding. `sampling` holds the SamplingParams that
    a request without them gets. `keep_alive` is the longest silence in a stream, in seconds (0: no limit).
    """

    model_name: str
    vocab_size: int
    tokenizer: Tokenizer
    engine: AsyncEngine
    format: ChatFormat
    grammars: Grammars
    metrics: Metrics
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keep_alive: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served; no name means the one that is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"The model {name[:100]!r} does not exist here; this server has {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """The tokens of `text`, which came in the field `param`.

        Raises ApiError 400 for half of a surrogate pair, which JSON can write but no text can hold.
        """
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TextError as error:
            raise bad_request(f"{param}: {error}", param=param) from error

    def _check_size(self, prompts: int, choices: int, param: str) -> None:
        """Raises ApiError 400 for more answers than there is ever room for: to try again would not help."""
        most = self.engine.capacity
        if prompts * choices > most:
            what = f"{prompts} prompts with {choices} choices each" if prompts > 1 else f"{choices} choices"
            name = "n" if prompts <= most and choices > 1 else param
            raise bad_request(
                f"{name}: {what} are {prompts * choices} answers, and this server takes at most {most} at a "
                "time: ask for fewer, or give it a larger --queue",
                param=name,
                code="too_many_answers",
            )

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[SamplingParams],
        *,
        param: str,
        keep_markers: bool = False,
        constrain: Callable[[], Constraint | None] = lambda: None,
    ) -> Generation:
        """One engine request for each choice of each prompt, the choices of a prompt side by side.

        Raises ApiError; `param` is the field that the prompts came in.
        """
        jobs = [(prompt, params) for prompt in prompts for params in choices]
        self._check_size(len(prompts), len(choices), param)
        try:
            generation = Generation(
                self.engine,
                jobs,
                keep_markers=keep_markers,
                constrain=constrain,
                on_token=self.metrics.token,
            )
        except Exception as error:
            raise from_exception(error, prompt_param=param) from error
        note_submitted(generation.timings, prompt_tokens=sum(map(len, prompts)), choices=len(choices))
        return generation
