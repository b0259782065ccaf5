"""What an engine has done since it was made: plain sums, which cost a step next to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Only the engine's thread writes them; any thread may read.

    prompt_tokens     tokens in the prompts of requests that were admitted
    cached_tokens     of those, the ones whose KV was there already
    looked_up_tokens  of those, the ones that were looked up in the prefix cache
    prefilled_tokens  tokens of prompts that were computed, those of preempted requests more than once
    riding_tokens     of those, the ones that were fed in decode rows and not through the prefiller
    generated_tokens  tokens that requests were given
    prefill_seconds   time in the prefiller
    decode_seconds    time in the decode backend, and in what is done with its tokens between two steps
    steps             decode steps
    steps_by_rows     decode steps by how many rows they had
    cancelled         requests that were cancelled before they had ended
    cancelled_late    of those, the ones during whose end more than one step was run: there should be none
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
    prefilled_tokens: int = 0
    riding_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    steps_by_rows: dict[int, int] = field(default_factory=dict)
    cancelled: int = 0
    cancelled_late: int = 0

    def count_step(self, rows: int) -> None:
        """One decode step with this many rows."""
        self.steps += 1
        self.steps_by_rows[rows] = self.steps_by_rows.get(rows, 0) + 1

    def count_prompt(self, tokens: int, *, cached: int, looked_up: bool) -> None:
        """A request was admitted for the first time."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.looked_up_tokens += tokens if looked_up else 0

    def count_cancellation(self, *, steps_before: int) -> None:
        """A request ends that was cancelled when `steps` was `steps_before`."""
        self.cancelled += 1
        self.cancelled_late += self.steps - steps_before > 1
