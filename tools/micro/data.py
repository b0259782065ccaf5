"""From text to arrays of token ids: what `prepare` writes and training reads.

A document is BOS, its tokens, and the end of turn, so that the model also learns where a file ends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.model.tokenizer import Tokenizer
from tools.micro.chats import make_chats
from tools.micro.text import SourceFile, read_library
from tools.micro.vocabulary import train_vocabulary, write_vocabulary

TokenArray = NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """What the model card says about the text; bytes are those of the files, without markers."""

    files: int
    held_out_files: int
    chats: int
    train_bytes: int
    train_tokens: int
    held_out_bytes: int
    held_out_tokens: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents end to end: token ids, which of them the model is to predict, and where documents start."""

    tokens: TokenArray
    learn: NDArray[np.bool_]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[tuple[Sequence[int], int]]) -> Corpus:
        """From (ids, ids at the front that are only given and not to be predicted)."""
        lengths = np.array([len(ids) for ids, _ in documents])
        ends = lengths.cumsum()
        learn = np.ones(int(ends[-1]), dtype=np.bool_)
        for end, length, (_, given) in zip(ends, lengths, documents, strict=True):
            learn[end - length : end - length + given] = False
        tokens = np.concatenate([np.array(ids, dtype=np.uint16) for ids, _ in documents])
        return cls(tokens, learn, ends - lengths)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, tokens=self.tokens, learn=np.packbits(self.learn), starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        with np.load(path) as arrays:
            tokens = arrays["tokens"]
            learn = np.unpackbits(arrays["learn"], count=len(tokens)).astype(np.bool_)
            return cls(tokens, learn, arrays["starts"])


def prepare(
    text: Path, out: Path, *, vocabulary: int, chats: int, max_positions: int, seed: int
) -> TextFacts:
    """Write the tokenizer (out/tokenizer), the train and held-out corpora and facts.json under `out`."""
    files = read_library(text)
    train, held_out = ([f for f in files if f.held_out is side] for side in (False, True))
    backend = train_vocabulary((file.text for file in train), vocabulary)
    write_vocabulary(backend, out / "tokenizer", max_positions)
    tokenizer = Tokenizer.from_pretrained(out / "tokenizer")
    talks = make_chats(train, chats, seed)
    documents = [(_file_ids(tokenizer, file), 1) for file in train]
    for chat in talks:
        prompt = chat.prompt(tokenizer)
        completion = tokenizer.encode(chat.completion(), add_special_tokens=False)
        documents.append((prompt + completion, len(prompt)))
    random.Random(seed).shuffle(documents)
    corpora = {
        "train": Corpus.of(documents),
        "held_out": Corpus.of([(_file_ids(tokenizer, f), 1) for f in held_out]),
    }
    for name, corpus in corpora.items():
        corpus.save(out / f"{name}.npz")
    facts = TextFacts(
        files=len(files),
        held_out_files=len(held_out),
        chats=len(talks),
        train_bytes=_bytes(train),
        train_tokens=len(corpora["train"].tokens),
        held_out_bytes=_bytes(held_out),
        held_out_tokens=len(corpora["held_out"].tokens),
        vocabulary=tokenizer.vocab_size,
    )
    (out / "facts.json").write_text(json.dumps(asdict(facts), indent=2) + "\n")
    return facts


def _file_ids(tokenizer: Tokenizer, file: SourceFile) -> list[int]:
    return [*tokenizer.encode(file.text), tokenizer.eos_token_ids[0]]


def _bytes(files: Sequence[SourceFile]) -> int:
    return sum(len(file.text.encode()) for file in files)
