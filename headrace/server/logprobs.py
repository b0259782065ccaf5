"""Log-probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Sequence
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


class CompletionLogprobs:
    """`choices[].logprobs` of text completions: parallel lists, and offsets that run on through a stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def next(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists for the tokens that follow the ones before."""
        tokens = [self._text(entry.token) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
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
