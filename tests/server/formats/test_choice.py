"""The format is chosen by what the tokenizer and its template hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.load import resolve
from headrace.model.tokenizer import Tokenizer
from headrace.server.formats import choose_format
from headrace.server.formats.machine import Lane
from headrace.server.formats.plain import PlainParser
from tests.server.formats.parsing import Parsed, parse

NORTH_MICRO = Path(__file__).resolve().parents[3] / "models" / "north-micro"


def test_north_by_its_markers_and_template() -> None:
    assert choose_format(Tokenizer.synthetic(512)).name == "north"
    assert choose_format(Tokenizer.from_pretrained(NORTH_MICRO)).name == "north"


def test_a_template_with_tool_call_tags_is_hermes() -> None:
    tokenizer = Tokenizer.synthetic(512)
    tokenizer.chat_template = "{% if tools %}<tool_call>{% endif %}"
    assert choose_format(tokenizer).name == "hermes"


def test_anything_else_is_plain() -> None:
    assert choose_format(Tokenizer.from_pretrained(resolve("smollm2"))).name == "plain"
    tokenizer = Tokenizer.synthetic(512)
    tokenizer.chat_template = None
    assert choose_format(tokenizer).name == "plain"
    assert parse(PlainParser(), ["<|START_ACTION|> ", "", "x"]) == Parsed(content="<|START_ACTION|> x")


@pytest.mark.parametrize(
    ("variables", "lane"),
    [({}, Lane.THINKING), ({"effort": "high"}, Lane.THINKING), ({"effort": "none"}, Lane.BETWEEN)],
)
def test_the_rendered_prompt_says_where_norths_answer_begins(variables: dict[str, str], lane: Lane) -> None:
    tokenizer = Tokenizer.from_pretrained(NORTH_MICRO)
    chosen = choose_format(tokenizer)
    extra = chosen.variables(variables["effort"]) if variables else {}
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}], **extra)
    assert chosen.parser(prompt).lane is lane
