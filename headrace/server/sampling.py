"""From the fields of a request to SamplingParams. Ranges are checked there, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.model.sampling import ParameterError, SamplingParams
from headrace.server.errors import bad_request
from headrace.server.protocol import ChatBody, CompletionBody, GenerationBody

_NONE: Mapping[str, Any] = {}

_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)


def chat_sampling(body: ChatBody, defaults: Mapping[str, Any] = _NONE) -> SamplingParams:
    """The sampling of a chat completion; `defaults` hold where it says nothing.

    Raises ApiError 400 or ParameterError, naming the field.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    names = _NONE if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    return _sampling(body, defaults, names, max_tokens=limit, logprobs=logprobs)


def completion_sampling(body: CompletionBody, defaults: Mapping[str, Any] = _NONE) -> SamplingParams:
    """The sampling of a text completion, in the same way."""
    # A prompt that is told and not continued goes through the engine for its scores, asked for or not.
    scored = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    return _sampling(
        body,
        defaults,
        _NONE,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=(body.logprobs or 0) if scored else None,
    )


def choices(params: SamplingParams, n: int | None) -> list[SamplingParams]:
    """The parameters of each of `n` choices.

    With a seed, choice i has seed + i (modulo 2^64): choices differ from one another, repeat from request to
    request, and the first is the one that n = 1 gives.
    """
    if params.seed is None:
        return [params] * (n or 1)
    return [replace(params, seed=params.seed + i) for i in range(n or 1)]


def _sampling(
    body: GenerationBody, defaults: Mapping[str, Any], names: Mapping[str, str], **more: int | None
) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    given["logit_bias"] = _logit_bias(body.logit_bias)
    given["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop
    return sampling_params(given | more, defaults, names)


def sampling_params(
    given: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] = _NONE
) -> SamplingParams:
    """What was given, null being nothing, over `defaults`.

    Raises ParameterError, which calls a parameter by its name in `names`: what its field is called.
    """
    values = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**dict(defaults) | values)
    except ParameterError as error:
        name = names.get(error.parameter, error.parameter)
        raise ParameterError(name, str(error).removeprefix(f"{error.parameter}: ")) from error


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Token ids are strings in JSON's objects."""
    if bias is None:
        return None
    for key in bias:
        if not key.isascii() or not key.isdigit():
            raise bad_request(f"logit_bias: {key[:50]!r} is not a token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
