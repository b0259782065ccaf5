"""Log-probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.model.sampling import TokenLogprobs
from headrace.model.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's stand-in for the logarithm of nothing, which JSON cannot write


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one object a token, with the most likely ones below it."""
    return {
        "content": [
            _chat_token(tokenizer, entry.token, entry.logprob)
            | {"top_logprobs": [_chat_token(tokenizer, token, value) for token, value in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(raw),
    }


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is told back: its text, its tokens, and how many characters of these were added to it.

    A text gets a beginning of sequence; that is a token of the prompt, but nobody wrote it.
    """

    text: str
    token_ids: Sequence[int]
    unseen: int = 0


def echo(tokenizer: Tokenizer, given: object, token_ids: Sequence[int]) -> Echo:
    """The prompt that was `given` as text or as token ids, and became `token_ids`."""
    decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
    if isinstance(given, str) and decoded.endswith(given):
        return Echo(given, token_ids, unseen=len(decoded) - len(given))
    return Echo(decoded, token_ids)


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two runs of lists, one after the other."""
    return {name: [*values, *second[name]] for name, values in first.items()}


class CompletionLogprobs:
    """`choices[].logprobs` of text completions: parallel lists, and offsets that run on through a stream.

    An offset says where in the choice's text a token begins, in characters: a token that only begins a
    character has no width of its own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(skip_special_tokens=False)
        self._offset = 0

    def echo(self, prompt: Echo, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists for the tokens of a prompt; nothing came before the first, so it has no probability."""
        self._offset = -prompt.unseen
        first = self._lists([TokenLogprobs(prompt.token_ids[0], 0.0, ())])
        rest = self._lists(entries)
        first |= {"token_logprobs": [None], "top_logprobs": [None]}
        return joined(first, rest)

    def next(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists for the tokens that follow the ones before."""
        return self._lists(entries)

    def _lists(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._stream.push([entry.token]))
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one, which may be less likely than all of them."""
        pairs = (*entry.top, (entry.token, entry.logprob))
        return {self._text(token): max(value, _LOWEST) for token, value in pairs}

    def _text(self, token: int) -> str:
        """A token as text, or, where it is a part of a character, its bytes as OpenAI spells them."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
