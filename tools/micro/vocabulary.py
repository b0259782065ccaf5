"""North Micro's tokenizer: byte-level BPE with North's markers, written as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headrace.model import markers
from headrace.model.tokenizer import north_chat_template

# North's identity lines, and ours in their place: the rest of the template is the same.
IDENTITY = {
    "Your name is North Mini Code.": "Your name is North Micro.",
    "You are a large language model built by Cohere.": (
        "You are a very small language model trained on Python's standard library."
    ),
}


def chat_template() -> str:
    """North's chat template with North Micro's name in it."""
    template = north_chat_template()
    for theirs, ours in IDENTITY.items():
        template = template.replace(theirs, ours)
    return template


def train_vocabulary(texts: Iterable[str], size: int) -> Backend:
    """A byte-level BPE of exactly `size` entries: padding and markers first, then bytes, then merges.

    Text is cut as GPT-2 does it, but for two things: an underscore belongs to a word, and a number is cut
    into digits. Of a line's indentation the last space goes with the line's first word.
    """
    backend = Backend(models.BPE())
    words = r" ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\p{N}|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[markers.PAD, *markers.MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != size:
        raise ValueError(f"the text yields only {backend.get_vocab_size()} of {size} entries: give more text")
    bos = backend.token_to_id(markers.BOS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{markers.BOS} $A",
        pair=f"{markers.BOS} $A {markers.BOS} $B",
        special_tokens=[(markers.BOS, bos)],
    )
    return backend


def write_vocabulary(backend: Backend, folder: Path, max_positions: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": markers.BOS,
        "eos_token": markers.END_OF_TURN,
        "pad_token": markers.PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
