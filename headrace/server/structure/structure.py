"""What of an answer must have which form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headrace.server.errors import bad_request
from headrace.server.protocol import warn_once
from headrace.server.structure.schemas import ForGrammar, Schema

# Characters of white space in a row: enough for deep indentation. Without a bound a model can stay in it.
MOST_SPACE = 32


@dataclass(frozen=True, slots=True)
class TextSchema:
    """The answer's words are JSON of `schema`, which came in the request's field `param`.

    `strict`: all of it must be kept; else what no grammar can say may be left out.
    """

    schema: Schema
    param: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class CallSchema:
    """A tool's arguments keep to `schema`; the rest is as in TextSchema."""

    name: str
    schema: Schema
    param: str
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class Structure:
    """`text` None leaves the words free, `calls` are the tools that may be called, empty for none.

    `must_call`: there is at least one call, and no words. `single`: at most one.
    """

    text: TextSchema | None = None
    calls: Sequence[CallSchema] = ()
    must_call: bool = False
    single: bool = False


def for_grammars(structure: Structure) -> Structure:
    """`structure` with schemas that their compiler keeps. Raises ApiError 400 where a strict one is not."""
    text = None if structure.text is None else _kept(structure.text)
    return replace(structure, text=text, calls=[_kept(_of_objects(call)) for call in structure.calls])


def _of_objects(call: CallSchema) -> CallSchema:
    """Arguments are objects, also where the schema does not say so or what it says cannot be kept."""
    return replace(call, schema={"type": "object", **call.schema})


_Some = TypeVar("_Some", TextSchema, CallSchema)


def _kept(asked: _Some) -> _Some:
    try:
        written = ForGrammar(asked.schema)
    except RecursionError as error:
        raise bad_request(f"{asked.param}: is nested too deep", param=asked.param) from error
    if not written.lost:
        return replace(asked, schema=written.schema)
    keywords = ", ".join(f'"{keyword}"' for keyword in written.lost)
    if asked.strict:
        raise bad_request(
            f"{asked.param}: {keywords} cannot be kept to in this place; write the schema without, "
            "or do not ask for a strict one",
            param=asked.param,
        )
    warn_once(f"Schemas are kept to without {keywords} where these stand, which no grammar here can say")
    return replace(asked, schema=written.schema)


def call_grammar(calls: Iterable[CallSchema], *, single: bool) -> str:
    """North's list of calls, laid out as its template does, as one of xgrammar's structural tags."""
    tags = [
        {
            "type": "tag",
            "begin": '{"tool_call_id": "',
            "content": {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]+"},
                    _constant(f'", "tool_name": {json.dumps(call.name, ensure_ascii=False)}, "parameters": '),
                    json_content(call.schema),
                ],
            },
            "end": "}",
        }
        for call in calls
    ]
    listed = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": ",\n    ",
        "at_least_one": True,
        "stop_after_first": single,
    }
    elements = [_constant("[\n    "), listed, _constant("\n]")]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def tagged_answer(structure: Structure, tags: tuple[str, str]) -> str:
    """A whole answer with its calls between `tags`, laid out as Hermes's templates do.

    Words that must keep to a schema stand alone, or calls do; free words may have calls among them.
    """
    opening, closing = tags
    calls = [
        {
            "type": "tag",
            "begin": f'{opening}\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": ',
            "content": json_content(call.schema),
            "end": f"}}\n{closing}",
        }
        for call in structure.calls
    ]
    once = {"tags": calls, "stop_after_first": structure.single}
    listed = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **once}
    answer: dict[str, Any] = listed
    if structure.text is not None:
        answer = {"type": "or", "elements": [json_content(structure.text.schema), listed]}
    elif not structure.must_call:
        answer = {"type": "triggered_tags", "triggers": [opening], "at_least_one": False, **once}
    return json.dumps({"type": "structural_tag", "format": answer})


def json_content(schema: Schema) -> dict[str, Any]:
    """JSON of `schema` as a part of a structural tag."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACE}


def _constant(text: str) -> dict[str, str]:
    return {"type": "const_string", "value": text}
