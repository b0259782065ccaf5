"""Structured output: answers and calls that keep to a schema, token by token."""

from headrace.server.structure.grammars import Grammars
from headrace.server.structure.structure import CallSchema, Structure, TextSchema

__all__ = ["CallSchema", "Grammars", "Structure", "TextSchema"]
