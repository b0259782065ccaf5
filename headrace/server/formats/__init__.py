"""Chat formats: how a model family writes turns. One module for each format, all behind one protocol.

`choose_format` picks by what the tokenizer and its chat template hold; nobody has to name a format.
"""

from headrace.server.formats.base import ChatFormat, OutputParser, choose_format
from headrace.server.formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatFormat",
    "Content",
    "Event",
    "OutputParser",
    "Reasoning",
    "choose_format",
]
