"""The tokenizer of a GGUF file, against transformers' reading of the same file and against known facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace.load import resolve
from headrace.model.errors import CheckpointError
from headrace.model.gguf import GGUFFile
from headrace.model.gguf_tokenizer import read_tokenizer
from headrace.model.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "def add(first, second):\n    return first + second\n",
    "  leading and   inner spaces\t\ttabs\n\n\nnewlines",
    "naïve café — “quotes” 日本語 😀",
    "<|im_start|>user\nHello<|im_end|>\n",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve("smollm2"))


def test_it_encodes_as_transformers_does(smollm2: Tokenizer) -> None:
    path = resolve("smollm2")
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        assert smollm2.encode(text) == theirs(text)["input_ids"]


def test_digits_are_tokens_of_their_own(smollm2: Tokenizer) -> None:
    """SmolLM2 was trained on single digits; this is what transformers' reading of the file leaves out."""
    assert [smollm2.token_text(token) for token in smollm2.encode("x = 2048")] == [
        "x", " =", " ", "2", "0", "4", "8",
    ]  # fmt: skip


def test_special_tokens_and_template_come_along(smollm2: Tokenizer) -> None:
    [end] = smollm2.encode("<|im_end|>")
    assert smollm2.eos_token_ids == (end,)
    assert smollm2.decode([end]) == ""
    assert smollm2.chat_template is not None
    assert smollm2.vocab_size == 49152


class Fields:
    """A GGUF file's metadata without the file."""

    path = Path("made-up.gguf")

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def value(self, key: str, default: Any = None) -> Any:
        value = self.fields.get(key.removeprefix("tokenizer.").removeprefix("ggml."))
        return default if value is None else value


def made_up(**fields: Any) -> Any:
    tokens = ["<s>", "a", "b", "1", "2", "12", "3", "123", "4", "ab"]
    known: dict[str, Any] = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3] + [1] * (len(tokens) - 1),
        "merges": ["1 2", "12 3", "a b"],
        "bos_token_id": 0,
        "add_bos_token": True,
    }
    return read_tokenizer(Fields(**known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "tokens"),
    [("smollm", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"]), ("gpt-2", ["123", "4"])],
)
def test_how_text_is_split(split: str, tokens: list[str]) -> None:
    assert made_up(pre=split).tokenize("1234") == tokens


def test_a_beginning_of_sequence_where_the_file_asks_for_one() -> None:
    assert made_up(pre="llama-bpe")("ab")["input_ids"] == [0, 9]
    assert made_up(pre="llama-bpe", add_bos_token=False)("ab")["input_ids"] == [9]


@pytest.mark.parametrize(("split", "ids"), [("llama-bpe", [0, 9]), ("smollm", [9]), ("gpt-2", [9])])
def test_where_the_file_does_not_say_llama_3_has_a_beginning_of_sequence(split: str, ids: list[int]) -> None:
    """As in llama.cpp (src/llama-vocab.cpp: add_bos by tokenizer_pre)."""
    assert made_up(pre=split, add_bos_token=None)("ab")["input_ids"] == ids


@pytest.mark.parametrize(
    "fields", [{"model": "llama"}, {"pre": "tekken"}, {"pre": "default"}, {}], ids=lambda fields: str(fields)
)
def test_an_unknown_kind_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="use the Hugging Face folder"):
        made_up(**fields)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"broken\.gguf is no readable GGUF file"):
        GGUFFile(tmp_path / "broken.gguf")
