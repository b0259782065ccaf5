"""What of an answer must have which form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

# Characters of white space in a row: enough for deep indentation. Without a bound a model can stay in it.
MOST_SPACE = 32


@dataclass(frozen=True, slots=True)
class TextSchema:
    """The answer's words are JSON of `schema`, which came in the request's field `param`."""

    schema: Schema
    param: str


@dataclass(frozen=True, slots=True)
class CallSchema:
    """A tool's arguments keep to `schema`."""

    name: str
    schema: Schema
    param: str


@dataclass(frozen=True, kw_only=True)
class Structure:
    """`text` None leaves the words free, `calls` are the tools that may be called, empty for none.

    `must_call`: there is at least one call, and no words. `single`: at most one.
    """

    text: TextSchema | None = None
    calls: Sequence[CallSchema] = ()
    must_call: bool = False
    single: bool = False


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
    return {"type": "json_schema", "json_schema": open_objects(schema), "max_whitespace_cnt": MOST_SPACE}


def _constant(text: str) -> dict[str, str]:
    return {"type": "const_string", "value": text}


def open_objects(schema: Any) -> Any:
    """`schema` with its objects of unnamed properties said to be open.

    The compiler takes an object as closed unless told otherwise. That keeps models from inventing
    parameters, but would leave nothing to an object that names none.
    """
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), Mapping):
            result[key] = {name: open_objects(value) for name, value in schema[key].items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            result[key] = [open_objects(value) for value in schema[key]]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            result[key] = open_objects(schema[key])
    if schema.get("type") == "object" and not schema.get("properties"):
        result.setdefault("additionalProperties", True)
    return result
