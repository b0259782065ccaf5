"""Tool calls written as JSON, read character by character.

A call is an object with a name and an object of arguments, in any order and beside other keys; calls stand
alone or in a list. The arguments go out as they arrive, once the name is known. How the text is split
makes no difference.

Whoever feeds the reader looks for the marker that ends the calls: inside a JSON string a marker is data, so
the reader takes strings whole and stops before every "<" elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from headrace.server.formats.events import CallArguments, CallEnd, CallStart, Content, Event, append
from headrace.server.json_text import parsed

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_PLAIN = re.compile(r'[^"{}\[\],<\s]+')


class _State(Enum):
    BETWEEN = auto()  # outside of all objects
    KEY = auto()  # in a call's object, before a key or its end
    KEY_NAME = auto()  # inside a key
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    GARBAGE = auto()  # no calls after all: text


class CallReader:
    """Reads the calls of one answer; `index` numbers the next one, over all blocks of calls."""

    def __init__(self, *, name_keys: Collection[str], argument_keys: Collection[str]) -> None:
        self.index = 0
        self._name_keys = name_keys
        self._argument_keys = argument_keys
        self.begin()

    def begin(self) -> None:
        """A new block of calls."""
        self._state = _State.BETWEEN
        self._begin_object()

    def _begin_object(self) -> None:
        self._raw: list[str] = []  # the object so far: it is text if no name ever comes
        self._name: str | None = None
        self._has_arguments = False
        self._waiting: str | None = None  # whole arguments, while the name is not known
        self._key = ""
        self._begin_value()

    def _begin_value(self, *, streams: bool = False) -> None:
        self._value: list[str] = []
        self._streams = streams  # the value goes out as it is read
        self._begun = False
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a JSON string."""
        return self._state is _State.KEY_NAME or (self._state is _State.IN_VALUE and self._in_string)

    def feed(self, text: str, events: list[Event]) -> int:
        """Read `text` up to a "<" outside of strings; how many characters were read."""
        position = 0
        while position < len(text):
            if text[position] == "<" and not self.in_string:
                break
            position += self._read(text, position, events)
        return position

    def literal(self, character: str, events: list[Event]) -> None:
        """A "<" that begins no marker: JSON has none outside of strings, so this is no call."""
        self.end(events)
        self._state = _State.GARBAGE
        append(events, Content(character))

    def end(self, events: list[Event]) -> None:
        """The block's end marker. An object that is still open is no call, unless its name was given."""
        if self._state not in (_State.BETWEEN, _State.GARBAGE):
            self._give_up(events)

    def _read(self, text: str, position: int, events: list[Event]) -> int:
        """Take one character or a run of like ones; how many."""
        character = text[position]
        if self._state is _State.IN_VALUE:
            return self._read_value(text, position, events)
        if self._state is _State.GARBAGE:
            append(events, Content(character))
            return 1
        if self._state is not _State.BETWEEN and self._name is None:
            self._raw.append(character)
        match self._state:
            case _State.BETWEEN:
                self._read_between(character, events)
            case _State.KEY:
                self._read_key_start(character, events)
            case _State.KEY_NAME:
                self._read_key(character)
            case _State.COLON:
                if character == ":":
                    self._state = _State.VALUE
                elif not character.isspace():
                    self._give_up(events, character)
            case _State.VALUE:
                if not character.isspace():
                    return self._start_value(text, position, events)
        return 1

    def _read_between(self, character: str, events: list[Event]) -> None:
        if character == "{":
            self._begin_object()
            self._raw = [character]
            self._state = _State.KEY
        elif character not in "[]," and not character.isspace():
            self._state = _State.GARBAGE
            append(events, Content(character))

    def _read_key_start(self, character: str, events: list[Event]) -> None:
        if character == '"':
            self._key = ""
            self._escaped = False
            self._state = _State.KEY_NAME
        elif character == "}":
            self._end_object(events)
        elif character != "," and not character.isspace():
            self._give_up(events, character)

    def _read_key(self, character: str) -> None:
        if character == '"' and not self._escaped:
            self._state = _State.COLON
        else:
            self._escaped = character == "\\" and not self._escaped
            self._key += character

    def _start_value(self, text: str, position: int, events: list[Event]) -> int:
        """The first character of a value has been seen; it is read again, as a part of it."""
        character = text[position]
        named = self._name is not None
        if not named:
            self._raw.pop()
        self._state = _State.IN_VALUE
        if character in ",}]":  # no value at all
            self._give_up(events)
            return 0
        self._begin_value(streams=named and self._is_arguments and character == "{")
        return self._read_value(text, position, events)

    @property
    def _is_arguments(self) -> bool:
        """The key is that of the arguments, and of the first ones."""
        return self._key in self._argument_keys and not self._has_arguments

    def _read_value(self, text: str, position: int, events: list[Event]) -> int:
        character = text[position]
        if self._in_string:
            return self._read_string(text, position, events)
        if self._depth == 0 and self._begun and (character in ",}]" or character.isspace()):
            self._end_value(events)
            return 0
        if run := _PLAIN.match(text, position):
            self._take(run[0], events)
            return len(run[0])
        self._take(character, events)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(events)
        return 1

    def _read_string(self, text: str, position: int, events: list[Event]) -> int:
        """Inside a string. A bare control character, which JSON forbids and models write, is escaped."""
        character = text[position]
        if not self._escaped and (run := _IN_STRING.match(text, position)):
            self._take(run[0], events)
            return len(run[0])
        if character < " ":
            character = json.dumps(character)[1:-1]
            if self._escaped:  # a backslash before a line's end: keep both
                character = "\\" + character
        self._take(character, events)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 0:
                self._end_value(events)
        return 1

    def _take(self, text: str, events: list[Event]) -> None:
        """A piece of the value under way."""
        self._begun = True
        if self._streams:
            append(events, CallArguments(self.index, text))
            return
        self._value.append(text)
        if self._name is None:
            self._raw.append(text)

    def _end_value(self, events: list[Event]) -> None:
        self._state = _State.KEY
        value = "".join(self._value)
        if self._streams:
            self._has_arguments = True
        elif self._key in self._name_keys and self._name is None:
            name = _loads(value)
            if isinstance(name, str) and name:
                self._name, self._raw = name, []
                append(events, CallStart(self.index, name))
        elif self._is_arguments:
            self._waiting = _as_object(value)
            self._has_arguments = True
        if self._name is not None and self._waiting is not None:
            append(events, CallArguments(self.index, self._waiting))
            self._waiting = None

    def _end_object(self, events: list[Event]) -> None:
        self._state = _State.BETWEEN
        if self._name is None:
            append(events, Content("".join(self._raw)))
            return
        if not self._has_arguments:
            append(events, CallArguments(self.index, "{}"))
        append(events, CallEnd(self.index))
        self.index += 1

    def _give_up(self, events: list[Event], character: str = "") -> None:
        """From `character` on this is not JSON but text, and so is the call so far if it has no name."""
        if self._name is None:
            if self._raw:
                append(events, Content("".join(self._raw)))
        else:
            if not self._has_arguments and not (self._streams and self._begun):
                append(events, CallArguments(self.index, "{}"))
            self.index += 1
            if character:
                append(events, Content(character))
        self._state = _State.GARBAGE


def _loads(text: str) -> object:
    try:
        return parsed(text)
    except ValueError:
        return None


def _as_object(text: str) -> str:
    """Arguments that are not written as an object: JSON inside a string is taken out, null is none at all."""
    value = _loads(text)
    if isinstance(value, str) and isinstance(_loads(value), dict):
        return value
    return "{}" if value is None or value == "" else text
