"""Text to token ids and back: a byte-level tokenizer, its chat template, and incremental detokenisation.

Both model families use byte-level BPE (the GPT-2 scheme): every token is a string of bytes, and text is
those bytes read as UTF-8. Decoding is therefore done here on bytes, which makes the incremental form exact
and cheap; the encoder and the template's Jinja environment are those of `transformers`.
"""

from __future__ import annotations

import codecs
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.model import markers

# What a chat template may be given besides the messages; transformers' other parameters are not for callers.
_TEMPLATE_PARAMETERS = frozenset({"documents", "continue_final_message"})


class TokenizerError(ValueError):
    """A tokenizer that cannot be read or used; the message names the path and says what to do."""


class TextError(ValueError):
    """A string that is no text: half of a surrogate pair, or bytes of a terminal's that are not UTF-8."""


class ChatTemplateError(ValueError):
    """A conversation that the chat template cannot render; the message says why."""


class TokenStream:
    """Text of one sequence of tokens, given out as it arrives and never half a character.

    The pieces put together are `Tokenizer.decode` of all tokens, except that bytes at the very end which only
    begin a character are dropped by `flush` where `decode` shows U+FFFD. Bytes that can no longer become a
    character appear as U+FFFD at once. A push costs time in proportion to its own tokens.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while they are inside a character."""
        pieces = self._pieces
        return self._utf8.decode(b"".join([pieces[token] for token in ids]))

    def flush(self) -> str:
        """End the sequence: forget an unfinished character. The stream can then be used for another one."""
        self._utf8.reset()
        return ""


class Tokenizer:
    """A byte-level `transformers` fast tokenizer behind the few operations that serving needs.

    Token ids at or above `vocab_size` (a model may have padding rows there) decode to nothing. Unlike
    transformers' `decode`, nothing here tidies the spaces before punctuation, which would damage code.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    has_chat_markers: bool
    """Whether all of North's chat markers are tokens: their text is then what an output parser looks for."""

    def __init__(self, fast: Any, *, eos_token_ids: Sequence[int] = (), source: str = "tokenizer") -> None:
        """Wrap `fast`; its own end-of-sequence token and North's end of turn are added to `eos_token_ids`."""
        from tokenizers import decoders

        self._fast = fast
        self._backend = fast.backend_tokenizer
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            raise TokenizerError(
                f"{source} is not a byte-level tokenizer (its decoder is {self._backend.decoder!r:.60}); "
                "use a checkpoint with a byte-level BPE tokenizer, as Cohere's and Llama 3's are"
            )
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = len(fast)
        added = self._backend.get_added_tokens_decoder()
        special = frozenset(token for token, entry in added.items() if entry.special)
        self._all_pieces = _Pieces(self._backend)
        self._text_pieces = _Pieces(self._backend, hidden=special)
        named = [fast.eos_token_id, self._backend.token_to_id(markers.END_OF_TURN)]
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *(token for token in named if token is not None)}))
        self.chat_template = _default_template(fast.chat_template)
        self.has_chat_markers = all(self._backend.token_to_id(name) is not None for name in markers.MARKERS)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder (tokenizer.json) or of a .gguf file.

        The chat template is chat_template.jinja where the folder has one, else the one in
        tokenizer_config.json. Ids that end a sequence are gathered from generation_config.json, config.json
        and the tokenizer itself.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            if not path.is_file():
                raise TokenizerError(
                    f"{path} does not exist: give the path of a .gguf file or a model folder"
                )
            return cls._from_gguf(path)
        if not (path / "tokenizer.json").is_file():
            raise TokenizerError(
                f"{path} holds no tokenizer.json: give a Hugging Face model folder with a fast tokenizer, "
                "or a .gguf file"
            )
        eos = {token for name in ("generation_config.json", "config.json") for token in _eos_of(path / name)}
        return cls(_read(path), eos_token_ids=sorted(eos), source=str(path))

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from headrace.model.errors import CheckpointError
        from headrace.model.gguf import GGUFFile
        from headrace.model.gguf_tokenizer import read_tokenizer

        try:
            file = GGUFFile(path)
            return cls(read_tokenizer(file), eos_token_ids=file.config().eos_token_ids, source=str(path))
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error

    @classmethod
    def synthetic(cls, vocab_size: int) -> Tokenizer:
        """A tokenizer of exactly `vocab_size` entries for weights that have none, with North's chat format.

        It holds a token per byte, North's markers, and fillers that no text encodes to but that show when a
        model picks them, as in " t1234".
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        names = [markers.PAD, *markers.MARKERS]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        smallest = len(names) + len(alphabet)
        if vocab_size < smallest:
            raise TokenizerError(
                f"a synthetic tokenizer needs a vocabulary of at least {smallest}, not {vocab_size}"
            )
        entries = names + alphabet + [f"Ġt{token}" for token in range(smallest, vocab_size)]
        backend = Backend(models.BPE(vocab={entry: token for token, entry in enumerate(entries)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=markers.PAD,
            bos_token=markers.BOS,
            eos_token=markers.END_OF_TURN,
            additional_special_tokens=list(markers.MARKERS),
            chat_template=north_chat_template(),
        )
        return cls(fast, source="the synthetic tokenizer")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Names of special tokens within it become those tokens.

        `add_special_tokens` adds what the tokenizer puts around a plain text (for most, a beginning of
        sequence); leave it out for text that a chat template made. Raises TextError.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not valid Unicode ({error.reason})") from error
        # The call for a single text would hold the interpreter, and with it every other thread, to its end.
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 appear as U+FFFD."""
        pieces = self._text_pieces if skip_special_tokens else self._all_pieces
        return b"".join([pieces[token] for token in ids]).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; the name itself for a special token."""
        return self._all_pieces[token]

    def token_text(self, token: int) -> str:
        """One token alone as text, special or not; U+FFFD where it is part of a character."""
        return self._all_pieces[token].decode("utf-8", "replace")

    def stream(self, *, skip_special_tokens: bool = True) -> TokenStream:
        """A new incremental decoder. A parser of North's output needs the markers: pass False."""
        return TokenStream(self._text_pieces if skip_special_tokens else self._all_pieces)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the text that the model reads, by the template in transformers' Jinja sandbox.

        `variables` reach the template (for North: reasoning, reasoning_effort, ...).

        Raises:
            ChatTemplateError: without a template, for a reserved variable, or where the template refuses.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template: send the prompt as plain text (/v1/completions)"
            )
        if reserved := _reserved_parameters(self._fast).intersection(variables):
            raise ChatTemplateError(
                f"{', '.join(sorted(reserved))} cannot be set as a chat template variable"
            )
        try:
            rendered = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program: any of Jinja's and Python's errors can come out
            raise ChatTemplateError(f"the chat template cannot render this conversation: {error}") from error
        return str(rendered)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """`render_chat` as token ids. The template writes the special tokens, so none are added."""
        text = self.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=False)


class _Pieces(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for; none for hidden and unknown ids."""

    def __init__(self, backend: Any, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden

    def __missing__(self, token: int) -> bytes:
        name = None if token in self._hidden or token < 0 else self._backend.id_to_token(int(token))
        piece = b"" if name is None else _bytes_of(name)
        self[token] = piece
        return piece


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's encoder).

    Printable Latin-1 characters stand for themselves; the other bytes, in order, take U+0100 onwards.
    """
    spare = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte), byte
        else:
            yield chr(spare), byte
            spare += 1


_BYTE_OF = dict(_byte_alphabet())


def _bytes_of(name: str) -> bytes:
    """A vocabulary entry's bytes. An entry outside the byte alphabet (an added token) is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:
        return name.encode()


def north_chat_template() -> str:
    """North's chat format as a Jinja template."""
    return resources.files("headrace.model").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def _read(folder: Path) -> Any:
    """The transformers tokenizer of `folder`, from its tokenizer.json as it stands.

    Not AutoTokenizer: that rebuilds some tokenizers from their class's own recipe rather than from the file.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the reader raises many kinds, down to the Rust library's bare Exception
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} holds no tokenizer that can be read: {error}"
        ) from error


def _eos_of(path: Path) -> Iterator[int]:
    """The eos_token_id entries of a configuration file, which may be absent, one number, or a list."""
    if not path.is_file():
        return
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{path} is not a JSON object: {error}") from error
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise TokenizerError(f"{path}: eos_token_id is {value!r}: it must be a token id or a list of them")
    yield from tokens


def _default_template(template: str | dict[str, str] | None) -> str | None:
    """The template used without tools, where a checkpoint has several by name."""
    return template.get("default") if isinstance(template, dict) else template


def _reserved_parameters(fast: Any) -> frozenset[str]:
    return (
        frozenset(("self", *inspect.signature(fast.apply_chat_template).parameters))
        - _TEMPLATE_PARAMETERS
        - {"kwargs"}
    )
