"""From logits to a token: what every sampling parameter means, once and for all backends.

The order is fixed. On the raw logits of one row, in float32:

1. penalties, over the tokens seen so far. `repetition_penalty` r counts prompt and output: a seen token's
   logit is divided by r when positive and multiplied by r otherwise. `frequency_penalty` subtracts itself
   times the count in the output, `presence_penalty` once for every token present in the output;
2. `logit_bias` is added;
3. temperature 0 takes the largest logit (ties: lowest id) and ends here; otherwise logits / temperature;
4. `top_k` keeps the k largest (ties at the border: lowest ids);
5. `top_p` keeps the smallest set of most likely tokens, of those left, whose probability reaches p;
6. `min_p` keeps tokens, of those left, with at least p times the largest probability;
7. one of the tokens left is drawn in proportion to its probability, by the Gumbel-max trick: the largest
   logit + noise wins, with noise from a counter-based generator (see `headrace.model.philox`) keyed by
   (seed, position, token id). A draw depends on nothing else: not on other rows, nor on how often it ran.

Log-probabilities are those of the raw logits, before step 1, as OpenAI's and vLLM's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class ParameterError(ValueError):
    """A sampling parameter out of its range; `parameter` names it."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of `token`, which was taken, and of the `top` most likely tokens.

    `top` holds (token, log-probability) pairs, the most likely first (ties: lowest id); it lists `token` only
    if that is among them. Natural logarithms of the model's own distribution, whatever the sampling parameters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

        SamplingParams()                                  # draw from the model's own distribution
        SamplingParams(temperature=0)                     # greedy
        SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=100, stop=["\\n\\n"])

    `top_k` 0 and `top_p` 1 switch these off. `seed` None takes a fresh one for each request. `max_tokens` None
    means what is left of the context. A `stop` string ends the text before it, also when it spans tokens;
    a stop token ends the request and gives no text. `logprobs` n reports the log-probability of each token
    and of the n most likely (0: of the token alone; None: nothing). `ignore_eos` is for benchmarks.

    Raises ParameterError, which names the parameter, for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
