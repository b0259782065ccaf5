"""North's answers: lanes, calls, and what models do instead."""

from __future__ import annotations

import json

import pytest

from headrace.model import markers
from headrace.server.formats import CallArguments, CallEnd, CallStart, Reasoning
from headrace.server.formats.north import NorthFormat
from tests.server.formats.parsing import Call, Parsed, parse, together

THINKING = "...<|START_THINKING|>"  # how prompts end with reasoning on, and off
ANSWERING = "...<|START_THINKING|><|END_THINKING|>"
CALL = '{"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "a"}}'
READ = Call("read", '{"path": "a"}', complete=True)


def north(text: str, prompt: str = THINKING) -> Parsed:
    """The answer; the same whole, and a character at a time."""
    whole = parse(NorthFormat().parser(prompt), [text])
    assert parse(NorthFormat().parser(prompt), list(text)) == whole
    return whole


def action(*calls: str) -> str:
    return "<|START_ACTION|>[\n    " + ",\n    ".join(calls) + "\n]<|END_ACTION|>"


def test_thoughts_then_text() -> None:
    text = "Let me see.\n<|END_THINKING|><|START_TEXT|> Hello.\n<|END_TEXT|>"
    assert north(text) == Parsed("Let me see.\n", " Hello.\n")


def test_it_starts_where_the_prompt_left_off() -> None:
    assert north("Hello.") == Parsed(reasoning="Hello.")
    assert north("Hello.", ANSWERING) == Parsed(content="Hello.")
    assert north("<|START_TEXT|>Hello.<|END_TEXT|>", ANSWERING) == Parsed(content="Hello.")
    assert north("<|START_THINKING|>hm<|END_THINKING|>Hello.", ANSWERING) == Parsed("hm", "Hello.")


def test_thoughts_then_calls() -> None:
    other = '{"tool_call_id": "1", "tool_name": "list", "parameters": {}}'
    text = f"I look.<|END_THINKING|>{action(CALL, other)}"
    assert north(text) == Parsed("I look.", "", [READ, Call("list", "{}", complete=True)])


def test_text_then_calls_in_two_blocks() -> None:
    text = f"<|END_THINKING|><|START_TEXT|>First.<|END_TEXT|>\n{action(CALL)}\n{action(CALL)}"
    assert north(text) == Parsed("", "First.", [READ, READ])


def test_an_action_inside_thinking() -> None:
    assert north(f"I look.{action(CALL)}") == Parsed("I look.", "", [READ])


def test_blocks_that_the_model_forgot_to_close() -> None:
    assert north("hm<|START_TEXT|>Hello.") == Parsed("hm", "Hello.")
    assert north(f"hm<|END_THINKING|><|START_TEXT|>Look:{action(CALL)}") == Parsed("hm", "Look:", [READ])


@pytest.mark.parametrize(
    "call",
    [
        '{"tool_name": "read", "tool_call_id": "0", "parameters": {"path": "a"}}',
        '{"parameters": {"path": "a"}, "tool_name": "read", "tool_call_id": "0"}',
        '{"tool_name":"read","parameters":{"path": "a"}}',
        '{"id": 7, "extra": [{"tool_name": "no"}], "tool_name": "read", "parameters": {"path": "a"}}',
        '{"name": "read", "arguments": {"path": "a"}}',
        '{"tool_name": "read", "parameters": "{\\"path\\": \\"a\\"}"}',
        '{"tool_name": "read", "parameters": {"path": "a"}, "parameters": {"path": "b"}}',
        '{"tool_name": "r\\u0065ad", "parameters": {"path": "a"}}',
    ],
)
def test_keys_in_any_order_and_other_spellings(call: str) -> None:
    assert north(f"<|END_THINKING|>{action(call)}") == Parsed(calls=[READ])
    assert north(f"<|END_THINKING|><|START_ACTION|>{call}<|END_ACTION|>") == Parsed(calls=[READ])


@pytest.mark.parametrize(
    "parameters", [', "parameters": {}', ', "parameters": null', ', "parameters": ""', ""]
)
def test_no_arguments_are_an_empty_object(parameters: str) -> None:
    text = action(f'{{"tool_name": "list"{parameters}}}')
    assert north(text) == Parsed(calls=[Call("list", "{}", complete=True)])


@pytest.mark.parametrize(
    "value",
    [
        "<|END_ACTION|>",
        "<|END_TEXT|> <|START_ACTION|>[{",
        'a "quoted" {brace} [bracket], back\\slash',
        "\\",
        "if a < b:\n\treturn <b>é€😀",
        '{"tool_name": "other"}',
    ],
)
def test_anything_inside_strings_is_data(value: str) -> None:
    arguments = json.dumps({"text": value, value: [1, {"n": [True, None, -1.5e3]}]}, ensure_ascii=False)
    text = action(f'{{"tool_name": "write", "parameters": {arguments}}}')
    assert north(text) == Parsed(calls=[Call("write", arguments, complete=True)])


def test_white_space_in_arguments_stays() -> None:
    arguments = '{\n  "path" : "a",\n  "n": [ 1,\n 2 ]\n}'
    text = action(f'{{"tool_name": "read", "parameters": {arguments}}}')
    assert north(text).calls[0].arguments == arguments


def test_line_ends_that_json_forbids_in_strings_are_escaped() -> None:
    text = action('{"tool_name": "write", "parameters": {"text": "a\nb\tc\\\\\n"}}')
    assert json.loads(north(text).calls[0].arguments) == {"text": "a\nb\tc\\\n"}


@pytest.mark.parametrize("length", range(len(CALL) + 1))
def test_a_call_cut_anywhere_has_no_end(length: int) -> None:
    parsed = north(f"hm<|END_THINKING|><|START_ACTION|>[\n    {CALL[:length]}")
    assert parsed.reasoning == "hm"
    assert parsed.content == ""
    if parsed.calls and length < len(CALL):
        assert not parsed.calls[0].complete
        assert READ.arguments.startswith(parsed.calls[0].arguments)


@pytest.mark.parametrize(
    ("inside", "content"),
    [
        ("no json at all < here", "no json at all < here"),
        ('[{"x": 1}]', '{"x": 1}'),
        ('[{"tool_name": 5, "parameters": {}}]', '{"tool_name": 5, "parameters": {}}'),
        ("[{tool_name: 'read'}]", "{tool_name: 'read'}]"),
        ('[{"a" "b"}]', '{"a" "b"}]'),
        ('[{"a": }]', '{"a": }]'),
        ('[{"a": <b>}]', '{"a": <b>}]'),
        ("", ""),
        ("[]", ""),
    ],
)
def test_an_action_without_calls_is_text(inside: str, content: str) -> None:
    parsed = north(f"<|START_ACTION|>{inside}<|END_ACTION|><|START_TEXT|>.<|END_TEXT|>")
    assert parsed == Parsed(content=content + ".")


def test_a_call_that_turns_into_garbage_ends_there() -> None:
    parsed = north(action('{"tool_name": "read" oh', CALL))
    assert parsed.calls == [Call("read", "{}")]
    assert parsed.content.startswith("oh")


def test_garbage_after_a_call_leaves_the_numbering_alone() -> None:
    block = f"<|START_ACTION|>[{CALL} < ]<|END_ACTION|>"
    assert north(block + block) == Parsed(content="< ]< ]", calls=[READ, READ])


def test_markers_never_show() -> None:
    text = "".join(f"{marker} x " for marker in markers.MARKERS if "START_ACTION" not in marker)
    parsed = north(text)
    for marker in (markers.END_THINKING, markers.START_TEXT, markers.END_TEXT, markers.END_OF_TURN):
        assert marker not in parsed.reasoning + parsed.content


def test_what_only_looks_like_a_marker_is_text() -> None:
    text = "a < b <| c <|START_TEX|> <|END_THINKING|><|START_TEXT|>1 << 2 <|END_"
    assert north(text) == Parsed("a < b <| c <|START_TEX|> ", "1 << 2 <|END_")


def test_arguments_go_out_as_they_arrive() -> None:
    parser = NorthFormat().parser(THINKING)
    assert parser.push('hm<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "write"') == [
        Reasoning("hm"),
        CallStart(0, "write"),
    ]
    assert parser.push(', "parameters": {"text": "abc') == [CallArguments(0, '{"text": "abc')]
    assert parser.push("def") == [CallArguments(0, "def")]
    assert parser.push('"}') == [CallArguments(0, '"}')]
    assert parser.push("}]") == [CallEnd(0)]


def test_events_out_of_order_are_seen() -> None:
    with pytest.raises(AssertionError):
        together([CallArguments(0, "x")])
