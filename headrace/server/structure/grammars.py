"""Schemas made into grammars over the model's vocabulary, by xgrammar, and kept for the next request."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.model import markers
from headrace.model.constraint import Constraint
from headrace.model.tokenizer import Tokenizer
from headrace.server.errors import ApiError, bad_request, busy
from headrace.server.formats import ChatFormat
from headrace.server.formats.machine import Marks
from headrace.server.structure.answer import Block, StructuredAnswer
from headrace.server.structure.schemas import Schema
from headrace.server.structure.structure import (
    MOST_SPACE,
    Structure,
    TextSchema,
    call_grammar,
    for_grammars,
    tagged_answer,
)
from headrace.server.structure.workers import Workers

COMPILE_SECONDS = 10.0
COMPILERS = 4  # at a time; a schema that took too long is compiled to its end all the same
CACHE_BYTES = 256 * 2**20

_MARKERS = frozenset(name.encode() for name in markers.MARKERS)

Make = Callable[[bool], Constraint]
"""A new constraint for one answer, which begins in thoughts or does not."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made of a structure, and the bytes of its grammars."""

    make: Make
    size: int


class Known:
    """Structures of past requests, up to CACHE_BYTES; whoever asks for one again needs no thread for it."""

    def __init__(self) -> None:
        self._prepared: OrderedDict[bytes, Prepared] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> Prepared | None:
        if key in self._prepared:
            self._prepared.move_to_end(key)
        return self._prepared.get(key)

    def add(self, key: bytes, prepared: Prepared) -> None:
        if key in self._prepared or prepared.size > CACHE_BYTES:
            return
        self._prepared[key] = prepared
        self._size += prepared.size
        while self._size > CACHE_BYTES:
            _, oldest = self._prepared.popitem(last=False)
            self._size -= oldest.size


class Grammars:
    """The grammars of one served model. Nothing is loaded before the first structure is asked for."""

    def __init__(self, tokenizer: Tokenizer, format_: ChatFormat, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._format = format_
        self._vocab_size = vocab_size
        self._compiler: Any = None
        self._workers = Workers(COMPILERS, "headrace-grammars")
        self._known = Known()
        self._overdue: dict[bytes, Future[Prepared]] = {}  # took too long, and are still being compiled
        self._markers = frozenset[int]()
        marks = format_.marks
        tags = (*marks.call_tags, marks.end_thinking or "") if marks and marks.call_tags else ()
        self._tags = frozenset(tag.encode() for tag in tags)  # text for grammars, whatever tokens they are

    async def prepare(self, structure: Structure) -> Make:
        """Compile what `structure` needs. On the event loop.

        Raises ApiError 400 that names the part which cannot be, and 429 where others kept it waiting.
        """
        self._check(structure)
        key = hashlib.sha256(repr(structure).encode(errors="surrogatepass")).digest()
        if (known := self._known.get(key)) is not None:
            return known.make
        job = self._overdue.get(key)  # who tries again, as clients do, gets no further thread for it
        if job is None:
            job = self._workers.submit(partial(self._prepare, structure))
        try:
            prepared = await asyncio.wait_for(asyncio.wrap_future(job), COMPILE_SECONDS)
        except TimeoutError as error:
            if job.cancelled():  # it was never begun
                raise busy(
                    "Schemas of other requests are still being compiled; try again later with a new one."
                ) from error
            param = structure.text.param if structure.text else "tools"
            self._note_overdue(key, job, param)
            raise bad_request(
                f"{param}: takes more than {COMPILE_SECONDS:g} s to compile; make the schema smaller",
                param=param,
            ) from error
        self._known.add(key, prepared)
        return prepared.make

    def _note_overdue(self, key: bytes, job: Future[Prepared], param: str) -> None:
        if key in self._overdue:
            return
        self._overdue[key] = job
        log.warning(
            "A schema in %s is not compiled after %g s, and goes on: such take %d of the %d threads for "
            "schemas. When they have all, new schemas are refused until one is done.",
            param, COMPILE_SECONDS, len(self._overdue), COMPILERS,
        )  # fmt: skip
        job.add_done_callback(lambda _: self._overdue.pop(key, None))

    def _check(self, structure: Structure) -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise ApiError(
                501, "Structured output needs a package: pip install xgrammar", code="not_installed"
            )
        marks = self._format.marks
        param = structure.text.param if structure.text else "tool_choice"
        if marks is None or (structure.calls and marks.calls is None and marks.call_tags is None):
            raise bad_request(f"{param}: cannot be kept with this model's chat format", param=param)

    def _prepare(self, structure: Structure) -> Prepared:
        self._load()
        structure = for_grammars(structure)
        marks = self._format.marks
        assert marks is not None
        ends = frozenset(self._tokenizer.eos_token_ids)
        if structure.calls and marks.call_tags is not None:
            blocks: dict[int | None, Block] = {None: Block(ends, self._tagged(structure, marks.call_tags))}
        else:
            blocks = self._blocks(structure, marks, ends)
        end_thinking: int | bytes | None = None
        if marks.end_thinking is not None:
            by_text = marks.call_tags is not None
            end_thinking = marks.end_thinking.encode() if by_text else self._id(marks.end_thinking)

        def make(thinking: bool) -> Constraint:
            return StructuredAnswer(
                blocks,
                end_thinking=end_thinking if thinking else None,
                outside=self._markers,
                ends=ends,
                vocab_size=self._vocab_size,
                bytes_of=self._tokenizer.token_bytes,
            )

        grammars = [block.grammar for block in blocks.values() if block.grammar is not None]
        return Prepared(make, sum(grammar.memory_size_bytes for grammar in grammars))

    def _blocks(self, structure: Structure, marks: Marks, ends: frozenset[int]) -> dict[int | None, Block]:
        """The blocks that an answer may have, each between its marks."""
        blocks: dict[int | None, Block] = {}
        if not structure.must_call:
            grammar = None
            if (text := structure.text) is not None:
                grammar = self._text(text)
            opening, close = self._pair(marks.text)
            more = bool(structure.calls)
            blocks[opening] = Block(ends if close is None else {close}, grammar, last=not more)
        if structure.calls:
            opening, close = self._pair(marks.calls)
            assert close is not None
            blocks[opening] = Block({close}, self._calls(structure))
        return blocks

    def _text(self, text: TextSchema) -> Any:
        return self._json(text.param, text.schema)

    def _tagged(self, structure: Structure, tags: tuple[str, str]) -> Any:
        """A whole answer with calls among its words."""
        if structure.text is not None:
            self._text(structure.text)
        self._check_calls(structure)
        return self._compile("tools", self._compiler.compile_structural_tag, tagged_answer(structure, tags))

    def _calls(self, structure: Structure) -> Any:
        self._check_calls(structure)
        tag = call_grammar(structure.calls, single=structure.single)
        return self._compile("tools", self._compiler.compile_structural_tag, tag)

    def _check_calls(self, structure: Structure) -> None:
        """Compile the calls' schemas one by one, to tell which of them is wrong."""
        for call in structure.calls:
            self._json(call.param, call.schema)

    def _json(self, param: str, schema: Schema) -> Any:
        compile_ = partial(self._compiler.compile_json_schema, max_whitespace_cnt=MOST_SPACE)
        return self._compile(param, compile_, schema)

    def _compile(self, param: str, compile_: Callable[[str], Any], source: Any) -> Any:
        try:
            return compile_(source if isinstance(source, str) else json.dumps(source))
        except (RuntimeError, ValueError) as error:
            reason = re.sub(r"^\[[^\]]*\] \S+: ", "", str(error)).strip()
            raise bad_request(f"{param}: cannot be compiled: {reason}", param=param) from error

    def _load(self) -> None:
        """Tell xgrammar the vocabulary. Markers and other special tokens are no text of any grammar.

        No token of it is said to end a text: each grammar has ends of its own, and xgrammar lets tokens that
        end a text by the vocabulary, and not by the grammar, appear inside of strings.
        """
        if self._compiler is not None:
            return
        import xgrammar

        tokenizer = self._tokenizer
        ids = range(tokenizer.vocab_size)
        special = {token for token in ids if self._is_special(token)}
        vocabulary = [b"" if token in special else tokenizer.token_bytes(token) for token in ids]
        vocabulary += [b""] * (self._vocab_size - len(vocabulary))  # rows that no token has
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=self._vocab_size, stop_token_ids=[])
        self._markers = frozenset(special)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=CACHE_BYTES)

    def _is_special(self, token: int) -> bool:
        piece = self._tokenizer.token_bytes(token)
        if piece in _MARKERS:
            return True
        return piece not in self._tags and not self._tokenizer.decode([token])

    def _pair(self, pair: tuple[str, str] | None) -> tuple[int | None, int | None]:
        return (None, None) if pair is None else (self._id(pair[0]), self._id(pair[1]))

    def _id(self, marker: str | None) -> int | None:
        """A marker's token: formats with marks fit only tokenizers in which each is one."""
        if marker is None:
            return None
        [token] = self._tokenizer.encode(marker, add_special_tokens=False)
        return token
