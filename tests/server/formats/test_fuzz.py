"""Whatever the model says and however it is split: the same answer, and no exception.

Where Cohere's own parser is right, it says the same. It is known to be wrong about empty arguments, keys in
another order, white space at the end or after line ends inside arguments, and citation tags.
"""

from __future__ import annotations

import json
from typing import Any

import cohere_melody
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model import markers
from headrace.server.formats.hermes import HermesFormat
from headrace.server.formats.north import NorthFormat
from tests.server.formats.parsing import Call, Parsed, parse, split

PROMPT = "<|START_THINKING|>"
CUTS = st.lists(st.integers(0, 10**6), max_size=12)

_WORDS = st.lists(st.sampled_from(["a", "be", "é", "x<y", "{", "}", '"', "\\", "[", "1,", "😀"]), min_size=1)
TEXT = _WORDS.map(" ".join)
NAMES = st.sampled_from(["read", "write_file", "list-all", "naïve"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXT | st.just("<|END_ACTION|>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)

SCRAPS = st.lists(
    st.sampled_from(
        [
            *markers.MARKERS,
            *(
                "<",
                "<|",
                "|>",
                "[",
                "]",
                "{",
                "}",
                '"',
                "\\",
                ":",
                ",",
                " ",
                "\n",
                "\x00",
                "é",
                "null",
                "<think>",
            ),
            *('"tool_name"', '"parameters"', '"name": "f"', '"arguments": {', '{"tool_name": "f", '),
            *("<tool_call>", "</tool_call>", "</think>"),
        ]
    )
    | st.text(max_size=3),
    max_size=30,
).map("".join)


@st.composite
def calls_as_text(draw: st.DrawFn, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A block of calls, with the keys of each in an order of its own."""
    written = []
    for number, (name, arguments) in enumerate(calls):
        fields: dict[str, Any] = {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
        if draw(st.booleans()):
            del fields["tool_call_id"]
        order = draw(st.permutations(list(fields)))
        written.append(json.dumps({key: fields[key] for key in order}, ensure_ascii=False))
    return f"[\n    {', '.join(written)}\n]"


@settings(max_examples=100)
@given(st.data(), TEXT, st.none() | TEXT, CALLS, CUTS)
def test_north_says_what_was_meant(
    data: st.DataObject,
    reasoning: str,
    content: str | None,
    calls: list[tuple[str, dict[str, Any]]],
    cuts: list[int],
) -> None:
    text = reasoning + markers.END_THINKING
    if content is not None:
        text += markers.START_TEXT + content + markers.END_TEXT
    if calls:
        text += markers.START_ACTION + data.draw(calls_as_text(calls)) + markers.END_ACTION
    parsed = parse(NorthFormat().parser(PROMPT), split(text, cuts))
    meant = [Call(name, json.dumps(arguments, ensure_ascii=False), True) for name, arguments in calls]
    assert parsed == Parsed(reasoning, content or "", meant)


@settings(max_examples=150)
@given(SCRAPS, CUTS)
def test_garbage_gives_the_same_however_it_is_split(text: str, cuts: list[int]) -> None:
    for prompt in (PROMPT, ""):
        for format_ in (NorthFormat(), HermesFormat()):
            whole = parse(format_.parser(prompt), [text])
            assert parse(format_.parser(prompt), split(text, cuts)) == whole


@settings(max_examples=100)
@given(SCRAPS, CUTS)
def test_garbage_inside_an_action(text: str, cuts: list[int]) -> None:
    text = markers.START_ACTION + '[{"tool_name": "f", "parameters": {' + text
    whole = parse(NorthFormat().parser(PROMPT), [text])
    assert parse(NorthFormat().parser(PROMPT), split(text, cuts)) == whole
    assert whole.calls[0].name == "f"


def melody(text: str) -> Parsed:
    result = cohere_melody.PyFilter(cohere_melody.PyFilterOptions().cmd4()).process_full_text(text)
    calls = [Call(call.name, call.arguments, True) for call in result.tool_calls]
    return Parsed(result.reasoning or "", result.content or "", calls)


_PLAIN_TEXT = st.text("abc ,.{}[]\"'\\né😀", min_size=1).map(str.strip).filter(bool)
_PLAIN_ARGUMENTS = st.dictionaries(
    _PLAIN_TEXT, _PLAIN_TEXT | st.integers() | st.lists(st.booleans()), min_size=1, max_size=3
)


@settings(max_examples=100)
@given(_PLAIN_TEXT, st.none() | _PLAIN_TEXT, st.lists(st.tuples(NAMES, _PLAIN_ARGUMENTS), max_size=3), CUTS)
def test_cohere_melody_agrees_where_it_is_right(
    reasoning: str, content: str | None, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    text = reasoning + markers.END_THINKING
    if content is not None:
        text += markers.START_TEXT + content + markers.END_TEXT
    if calls:
        written = [
            json.dumps(
                {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}, ensure_ascii=False
            )
            for number, (name, arguments) in enumerate(calls)
        ]
        text += markers.START_ACTION + "[\n    " + ",\n    ".join(written) + "\n]" + markers.END_ACTION
    assert parse(NorthFormat().parser(PROMPT), split(text, cuts)) == melody(text)
