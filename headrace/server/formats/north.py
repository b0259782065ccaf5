"""North's format (Cohere's cmd4 turns).

    {thoughts}<|END_THINKING|><|START_TEXT|>{answer}<|END_TEXT|>
    {thoughts}<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "a"}}
    ]<|END_ACTION|>

The template opens the thinking block, so an answer begins inside it; with reasoning off the block is closed
again in the prompt. A block may open inside another: models forget to close them. The ids that the model
writes are renumbered by the template and never shown to clients.
"""

from __future__ import annotations

from typing import Any

from headrace.model import markers
from headrace.model.tokenizer import Tokenizer
from headrace.server.formats.calls import CallReader
from headrace.server.formats.machine import Lane, LaneParser, Marks

_OPENS = {
    markers.START_THINKING: Lane.THINKING,
    markers.START_TEXT: Lane.ANSWER,
    markers.START_ACTION: Lane.CALLS,
}
_CLOSES = {
    markers.END_THINKING: Lane.THINKING,
    markers.END_TEXT: Lane.ANSWER,
    markers.END_ACTION: Lane.CALLS,
    markers.END_OF_TURN: None,  # ends whatever is open; seen only by requests that ignore the end of the turn
}


class NorthFormat:
    """See the module."""

    name = "north"
    keeps_markers = True
    marks: Marks | None = Marks(
        end_thinking=markers.END_THINKING,
        text=(markers.START_TEXT, markers.END_TEXT),
        calls=(markers.START_ACTION, markers.END_ACTION),
    )

    @staticmethod
    def fits(tokenizer: Tokenizer) -> bool:
        template = tokenizer.chat_template or ""
        return tokenizer.has_chat_markers and markers.START_ACTION in template

    def variables(self, effort: str) -> dict[str, Any]:
        return {"reasoning_effort": effort}

    def parser(self, prompt: str) -> LaneParser:
        thinking = prompt.endswith(markers.START_THINKING)
        return LaneParser(
            Lane.THINKING if thinking else Lane.BETWEEN,
            opens=_OPENS,
            closes=_CLOSES,
            calls=CallReader(name_keys=("tool_name", "name"), argument_keys=("parameters", "arguments")),
        )
