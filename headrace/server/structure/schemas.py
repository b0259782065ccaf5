"""JSON schemas as the grammars' compiler understands them, and what it would not keep of them.

The compiler drops what it does not know without a word, and more than that: beside an `anyOf` it drops the
properties, and of several schemas under `allOf` it makes any JSON at all. So schemas are written anew for it.
To allow less than a schema does is right too; what would allow more is told as lost.

    {"properties": P, "anyOf": [A, B]}   {"anyOf": [P and A, P and B]}, where one schema can say both
    {"allOf": [A, B]}                    A and B in one, in the same way
    {"type": "object", "required": [x]}  x is a property, of any kind
    {"minLength": 1}                     a string, though the schema lets numbers pass as well

`oneOf` is taken as `anyOf`: where several of its branches fit, so does the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

# What the compiler drops, with the value that says nothing.
_DROPPED: dict[str, Any] = {
    "not": None,
    "if": None,
    "contains": None,
    "uniqueItems": False,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "$dynamicRef": None,
    "$recursiveRef": None,
}
_UNIONS = ("anyOf", "oneOf")
_LOOKS = ("(?=", "(?!")  # of regular expressions; other things that it cannot do are errors
_DEFINITIONS = ("$defs", "definitions")
# Keywords that constrain nothing.
_WORDS = {
    *_DEFINITIONS,
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
}
_WORDS |= {"deprecated", "readOnly", "writeOnly", "discriminator", "nullable", "then", "else"}
# A schema without a type that has one of these is taken to be about values of this type alone.
_TYPES = {
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "propertyNames"), "object"),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}


class ForGrammar:
    """`schema` is one for the compiler; `lost` are the keywords of the original that it does not keep."""

    def __init__(self, schema: Any) -> None:
        self.lost: list[str] = []
        self.schema = self._written(schema)

    def _written(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        plain = dict(schema)
        for keyword in ("allOf", *_UNIONS):
            if isinstance(plain.get(keyword), list):
                plain = self._joined(plain, keyword)
        for keyword, nothing in _DROPPED.items():
            if plain.get(keyword, nothing) != nothing:
                self._lose(keyword)
                del plain[keyword]
        if "$ref" in plain:
            self._check_reference(plain)
        if "pattern" in plain:
            self._check_pattern(plain)
        self._write_inside(plain)
        if not plain.keys() & {"$ref", "allOf", *_UNIONS}:
            self._give_type(plain)
            if plain.get("type") == "object":
                self._name_properties(plain)
        return plain

    def _joined(self, schema: dict[str, Any], keyword: str) -> dict[str, Any]:
        """`schema` with the branches of `keyword` and what stands beside them as one.

        What cannot be one is left out, unless the compiler takes it: it does where no more than a type, which
        branches have of their own, stands beside them.
        """
        branches: list[Any] = schema[keyword]
        beside = _constraints(schema, keyword)
        words = {key: value for key, value in schema.items() if key in _WORDS}
        alone = beside.keys() <= {"type"} and (keyword != "allOf" or len(branches) == 1)
        if alone and not beside:
            return schema
        if keyword == "allOf":
            both: dict[str, Any] | None = beside
            for branch in branches:
                both = None if both is None else _both(both, branch)
            joined = self._joined(both, keyword) if both and keyword in both else both
        elif True in branches:
            joined = beside
        else:
            each = [_both(beside, branch) for branch in branches]
            joined = None if None in each else {keyword: each}
        if joined is not None:
            return {**words, **joined}
        if alone:
            return schema
        self._lose(keyword)
        return {**words, **beside}

    def _check_reference(self, schema: dict[str, Any]) -> None:
        """The compiler drops what stands beside a reference, and one that leads out of the schema."""
        reference = schema["$ref"]
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            self._lose("$ref")
        for keyword in _constraints(schema, "$ref").keys() - {"type"}:
            self._lose(keyword)
            del schema[keyword]

    def _check_pattern(self, schema: Schema) -> None:
        """The compiler drops what a pattern looks ahead for, and limits beside a pattern."""
        if any(look in str(schema["pattern"]) for look in _LOOKS):
            self._lose("pattern")
        for keyword in ("minLength", "maxLength"):
            if keyword in schema:
                self._lose(keyword)

    def _write_inside(self, schema: dict[str, Any]) -> None:
        for key in ("properties", "patternProperties", *_DEFINITIONS):
            if isinstance(schema.get(key), Mapping):
                schema[key] = {name: self._written(value) for name, value in schema[key].items()}
        for key in ("allOf", *_UNIONS, "prefixItems"):
            if isinstance(schema.get(key), list):
                schema[key] = [self._written(value) for value in schema[key]]
        for key in ("items", "additionalProperties", "propertyNames", "unevaluatedProperties"):
            if isinstance(schema.get(key), Mapping):
                schema[key] = self._written(schema[key])

    def _give_type(self, schema: dict[str, Any]) -> None:
        """The compiler drops most of what is said of values without a type."""
        if schema.keys() & {"type", "enum", "const"}:
            return
        types = {_TYPES[key]: key for key in schema if key in _TYPES}
        if len(types) == 1:
            schema["type"] = next(iter(types))
        for key in types.values() if len(types) > 1 else ():
            self._lose(key)

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """Make properties of those that are required and not described, which the compiler would drop.

        And say that an object without names is open. The compiler takes an object as closed unless told
        otherwise: that keeps models from inventing parameters, but would leave nothing to this one.
        """
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not properties:
            schema.setdefault("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return  # which is for the compiler to say
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        others = schema.get("additionalProperties", True)
        if missing and others is False:  # there is no such object
            self._lose("required")
        elif missing:
            schema["properties"] = {**properties, **dict.fromkeys(missing, others)}

    def _lose(self, keyword: str) -> None:
        if keyword not in self.lost:
            self.lost.append(keyword)


def _constraints(schema: Schema, but: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != but and key not in _WORDS}


def _both(left: Schema, right: Any) -> dict[str, Any] | None:
    """One schema for what fits both; None where it takes more than to lay one upon the other."""
    if right is True:
        return dict(left)
    if not isinstance(right, Mapping) or "$ref" in right or "$ref" in left:
        return None
    both = dict(left)
    for key, value in right.items():
        if key not in both or key in _WORDS:
            both[key] = value
        elif key == "required" and isinstance(value, list) and isinstance(both[key], list):
            both[key] = [*both[key], *(name for name in value if name not in both[key])]
        elif key == "properties" and isinstance(value, Mapping) and isinstance(both[key], Mapping):
            if any(both[key].get(name, schema) != schema for name, schema in value.items()):
                return None
            both[key] = {**both[key], **value}
        elif both[key] != value:
            return None
    for one, other in ((left, right), (right, left)):  # what one does not name it may not allow
        if one.get("additionalProperties", True) is not True and not _names(other) <= _names(one):
            return None
    return both


def _names(schema: Schema) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()
