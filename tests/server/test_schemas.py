"""Schemas as the grammars' compiler is given them: nothing passes that they forbid, or it is told what."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from headrace.server.structure.schemas import ForGrammar

NUMBER = {"type": "integer"}
A, B = {"a": NUMBER}, {"b": NUMBER}
AB = {"type": "object", "properties": {**A, **B}}
ANY_OF = [{"required": ["a"]}, {"required": ["b"]}]


@pytest.fixture(scope="module")
def compiler() -> Any:
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[])
    return xgrammar.GrammarCompiler(info)


def fits(compiler: Any, schema: Any, text: str) -> bool:
    grammar = compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=1)
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**AB, "anyOf": ANY_OF}, ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'], ["{}", "1", '{"c": 1}']),
        ({**AB, "oneOf": ANY_OF}, ['{"a": 1}', '{"b": 1}'], ["{}", "1"]),
        ({"type": "object", "properties": A, "anyOf": [{"properties": B}, {}]}, ['{"a": 1}'], ["1"]),
        ({**AB, "anyOf": ANY_OF, "oneOf": ANY_OF}, ['{"a": 1, "b": 2}'], ["{}", "1"]),
        ({**AB, "anyOf": [True, {"required": ["a"]}]}, ["{}"], ["1"]),
        ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 3}]}, ["6", "2"], ["4", "5.5"]),
        ({"allOf": [{"type": "object", "properties": A, "required": ["a"]}, AB]}, ['{"a": 1}'], ["{}", "1"]),
        ({**AB, "allOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"allOf": [AB, {"anyOf": ANY_OF}]}, ['{"b": 1}'], ["{}", "1"]),
        ({"allOf": [AB, {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}]}, [], ['{"a": 1}', "1"]),
        ({"type": "object", "properties": A, "required": ["b"]}, ['{"a": 1, "b": "x"}'], ['{"a": 1}']),
        ({"required": ["b"]}, ['{"b": "x"}', '{"b": 1, "c": 2}'], ["{}", "1"]),
        ({"minLength": 2}, ['"ab"'], ['"a"']),
        ({"minimum": 2}, ["2.5"], ["1"]),
        ({"$defs": {"n": {"minimum": 2}}, "$ref": "#/$defs/n"}, ["2"], ["1"]),
        ({"type": "object", "properties": {"x": {**AB, "anyOf": ANY_OF}}}, ['{"x": {"a": 1}}'], ['{"x": 1}']),
    ],
)
def test_what_the_compiler_would_drop_is_kept(
    compiler: Any, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    written = ForGrammar(schema)
    assert not written.lost
    assert [text for text in good if not fits(compiler, written.schema, text)] == []
    assert [text for text in bad if fits(compiler, written.schema, text)] == []
    assert [text for text in bad if fits(compiler, schema, text)] != [], "there was no need to write it anew"


@pytest.mark.parametrize(
    ("schema", "lost", "allowed"),
    [
        ({"type": "integer", "not": {"const": 1}}, "not", "1"),
        ({"type": "array", "items": NUMBER, "uniqueItems": True}, "uniqueItems", "[1, 1]"),
        ({"type": "array", "items": NUMBER, "contains": {"const": 5}}, "contains", "[1]"),
        ({**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", '{"a": 1}'),
        ({**AB, "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"a": 1}'),
        ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas", '{"a": 1}'),
        ({**AB, "dependencies": {"a": ["b"]}}, "dependencies", '{"a": 1}'),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength", '"aaa"'),
        ({"type": "string", "pattern": "^(?!ab)a.$"}, "pattern", '"ab"'),
        ({"$ref": "https://example.com/schema"}, "$ref", "1"),
        ({"$defs": {"ab": AB}, "$ref": "#/$defs/ab", "required": ["a"]}, "required", "{}"),
        ({"$defs": {"ab": AB}, **AB, "anyOf": [{"$ref": "#/$defs/ab"}]}, "anyOf", '{"a": 1}'),
        ({"$defs": {"ab": AB}, "allOf": [{"$ref": "#/$defs/ab"}, {"required": ["a"]}]}, "allOf", "1"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allOf", "1"),
        (
            {"allOf": [{**AB, "additionalProperties": False}, {"required": ["c"], "properties": {"c": {}}}]},
            "allOf",
            "1",
        ),
        ({**AB, "additionalProperties": False, "required": ["c"]}, "required", '{"a": 1}'),
        ({"minLength": 2, "minimum": 2}, "minimum", "1"),
        ({"type": "array", "items": {"not": {}}}, "not", "[1]"),
    ],
)
def test_what_cannot_be_kept_is_told(compiler: Any, schema: dict[str, Any], lost: str, allowed: str) -> None:
    """`allowed` is not what the schema allows, and passes."""
    written = ForGrammar(schema)
    assert lost in written.lost
    assert fits(compiler, written.schema, allowed)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {
            "type": "object",
            "properties": {**A, "either": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}},
        },
        {"description": "a", "allOf": [{"$ref": "#/$defs/x"}]},
        {"type": "object", "anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "discriminator": {}},
        {"type": "array", "items": NUMBER, "uniqueItems": False},
        {"$ref": "#/$defs/x", "type": "object", "description": "b", "default": {}},
    ],
)
def test_what_the_compiler_keeps_is_left_alone(schema: Any) -> None:
    written = ForGrammar(schema)
    assert not written.lost
    assert written.schema == schema


def test_the_client_s_own_schema_is_not_changed() -> None:
    schema = {"allOf": [dict(AB), {"anyOf": ANY_OF}], "title": "t"}
    before = json.dumps(schema)
    ForGrammar(schema)
    assert json.dumps(schema) == before
