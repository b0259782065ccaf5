"""From logits to a token: what every sampling parameter means, once and for all backends.

The order is fixed. Steps 1 to 3 and the comparisons of 4 and 6 are float32, every operation rounded by
itself, so that backends agree to the bit. On the raw logits of one row:

1. penalties, over the tokens seen so far. `repetition_penalty` r counts prompt and output: a seen token's
   logit is divided by r when positive and multiplied by r otherwise. Then `frequency_penalty` subtracts
   itself times the token's count in the output, and `presence_penalty` itself once from every token there;
2. `logit_bias` is added; then, where a grammar constrains the answer, tokens that it forbids get -infinity;
3. temperature 0 takes the largest logit (ties: lowest id) and ends here. Otherwise the score of a token is
   (logit - largest logit) / temperature: 0 for the most likely token, negative for the others;
4. `top_k` keeps the k largest scores (ties at the border: lowest ids);
5. `top_p` keeps the shortest run of the most likely tokens, of those left, whose share of the probability of
   those left reaches p. The token that crosses p is kept; among equals the lowest ids come first. A token's
   weight is the integer floor(2^44 exp(score)), exp in float64, so sums are exact in any order;
6. `min_p` keeps tokens whose probability is at least min_p times the largest, which is to say a score of at
   least ln(min_p). The ratio is the same before and after 4 and 5, but 5 does not see what 6 removes;
7. one of the tokens left is drawn in proportion to its probability, by the Gumbel-max trick: the largest
   score + noise wins (float64; ties: lowest id), with noise from a counter-based generator (see
   `headrace.model.philox`) keyed by (seed, position, token id). A draw depends on nothing else: not on other
   rows, nor on how often it ran.

Log-probabilities are those of the raw logits, before step 1, as OpenAI's and vLLM's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GREEDY_BELOW = 1e-5  # a lower temperature is 0: its draws would differ from greedy only between near-ties

# Wider than anyone's use, and narrow enough that no float32 logit overflows.
MAX_TEMPERATURE = 1000.0
MAX_REPETITION_PENALTY = 100.0
MAX_LOGPROBS = 20
MAX_STOPS = 1024  # every piece of text is searched for each of them


class ParameterError(ValueError):
    """A sampling parameter out of its range; `parameter` names it."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of `token`, which was taken, and of the `top` most likely tokens.

    `top` holds (token, log-probability) pairs, the most likely first (ties: lowest id); it lists `token` only
    if that is among them. Natural logarithms, of the model's own distribution whatever the parameters are.
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

    `temperature` below 1e-5 is greedy. `top_k` 0 (or -1) and `top_p` 1 switch these off. `seed` is any
    integer, of which the low 64 bits count; None takes a fresh one for each request. `max_tokens` None means
    what is left of the context. A `stop` string ends the text before it, also when it spans tokens; a stop
    token ends the request and gives no text. `logprobs` n reports the log-probability of each token and of
    the n most likely (0: of the token alone; None: nothing); `prompt_logprobs` does the same for the tokens
    of the prompt from the second on, and then `max_tokens` may be 0. `ignore_eos` is for benchmarks.

    After construction `stop` and `stop_token_ids` are tuples, `logit_bias` is a dict of its own, and numbers
    have the declared types. The object can be hashed and shared between threads; nothing may change it.

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
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._set("temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        self._set("top_k", _integer("top_k", self.top_k, -1, None, "-1 or 0 to switch it off, or positive"))
        self._set("top_k", max(self.top_k, 0))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, above_low=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        highest = MAX_REPETITION_PENALTY
        self._set(
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, 1 / highest, highest),
        )
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, None, None, "an integer") % 2**64)
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, least, None, f"{least} or more"))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                expected = f"from 0 to {MAX_LOGPROBS}"
                self._set(name, _integer(name, value, 0, MAX_LOGPROBS, expected))
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError("ignore_eos", f"must be true or false, not {self.ignore_eos!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Nothing is drawn: the largest logit wins."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        """top_k, top_p or min_p may remove tokens from the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def needs_history(self) -> bool:
        """A penalty looks at the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """A penalty or a bias applies, so that the row's logits are not the model's own."""
        return self.needs_history or bool(self.logit_bias)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ParameterError for a token id in `logit_bias` or `stop_token_ids` that does not exist."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            largest = max(ids, default=-1)
            if largest >= vocab_size:
                raise ParameterError(
                    name, f"token {largest} does not exist: the vocabulary has ids 0 to {vocab_size - 1}"
                )


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """`value` as a float in [low, high], or in (low, high]. NaN is in no interval."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        inside = low < value <= high or (value == low and not above_low)
        if inside:
            return float(value)
    bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
    raise ParameterError(name, f"must be a number {bounds}, not {value!r}")


def _integer(name: str, value: object, low: int | None, high: int | None, expected: str) -> int:
    """`value` as an int in [low, high], where None is no limit; `expected` says it in words."""
    if isinstance(value, int) and not isinstance(value, bool):
        inside = (low is None or value >= low) and (high is None or value <= high)
        if inside:
            return value
    raise ParameterError(name, f"must be {expected}, not {value!r}")


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ParameterError("logit_bias", f"must map token ids to numbers, not {value!r}")
    return {
        _integer("logit_bias", token, 0, None, "a map whose keys are token ids (integers from 0)"): _number(
            "logit_bias", bias, -100.0, 100.0
        )
        for token, bias in value.items()
    }


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise ParameterError("stop", f"must be a string or a list of strings, not {value!r}")
    if "" in strings:
        raise ParameterError("stop", "an empty string would end every text at once; leave it out")
    if len(strings) > MAX_STOPS:
        raise ParameterError("stop", f"{len(strings)} strings are too many; give at most {MAX_STOPS}")
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ParameterError(name, f"must be a list of token ids, not {value!r}")
    return tuple(_integer(name, token, 0, None, "a list of token ids (integers from 0)") for token in value)
