"""The tokenizer inside a GGUF file, put together with the `tokenizers` library.

A file holds the vocabulary, the merges, and the name of how text is split before merging
(`tokenizer.ggml.pre`); what the names mean is llama.cpp's (src/llama-vocab.cpp) and stands in `_SPLITS`.
transformers reads such files too, but not that name: it does not part the digits of SmolLM2.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headrace.model.errors import CheckpointError
from headrace.model.gguf import GGUFFile

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """Entries of `tokenizer.ggml.token_type` that are not plain text."""

    CONTROL = 3
    USER_DEFINED = 4


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
}


def read_tokenizer(file: GGUFFile) -> Any:
    """The file's tokenizer as a `PreTrainedTokenizerFast`, with its special tokens and chat template.

    Raises CheckpointError for a tokenizer that is not byte-level BPE, or is split in an unknown way.
    """
    kind = file.value("tokenizer.ggml.model")
    split = file.value("tokenizer.ggml.pre", "default")  # llama.cpp's guess, which it warns of: refused here
    if kind != "gpt2" or split not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: its tokenizer ({kind}, {split}) is not supported: "
            "use the Hugging Face folder of the model, which has a tokenizer.json"
        )
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3's own file says the same: what is a token as a whole is not merged step by step.
    is_llama3 = _SPLITS[split] is _llama3
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    backend.pre_tokenizer = _SPLITS[split]()
    backend.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type")
    backend.add_special_tokens(
        [
            _added(token, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    backend.add_tokens(
        [
            _added(token, special=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.USER_DEFINED
        ]
    )
    named = {name: _named(file, tokens, name) for name in ("bos", "eos", "padding")}
    # Converters write that down where a tokenizer's configuration does, and Llama 3's does not: llama.cpp
    # knows it of the split.
    if named["bos"] and file.value("tokenizer.ggml.add_bos_token", is_llama3):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{named['bos']} $A", special_tokens=[(named["bos"], vocabulary[named["bos"]])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named["bos"],
        eos_token=named["eos"],
        pad_token=named["padding"],
        chat_template=file.value("tokenizer.chat_template", "") or None,
    )


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _named(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    index = file.value(f"tokenizer.ggml.{name}_token_id", -1)
    return tokens[index] if 0 <= index < len(tokens) else None
