"""The format of Hermes, Qwen and others: JSON calls in <tool_call> tags, thoughts in <think> tags.

    <think>
    {thoughts}
    </think>
    {answer}
    <tool_call>
    {"name": "read", "arguments": {"path": "a"}}
    </tool_call>

Nothing marks the answer itself. The template may have opened the thinking block, or opened and closed it.
"""

from __future__ import annotations

from typing import Any

from headrace.model.tokenizer import Tokenizer
from headrace.server.formats.calls import CallReader
from headrace.server.formats.machine import Lane, LaneParser, Marks

_OPENS = {"<think>": Lane.THINKING, "<tool_call>": Lane.CALLS}
_CLOSES = {"</think>": Lane.THINKING, "</tool_call>": Lane.CALLS}


class HermesFormat:
    """See the module."""

    name = "hermes"
    keeps_markers = True  # where the tags are tokens, they may be special ones
    marks: Marks | None = Marks(end_thinking="</think>", call_tags=("<tool_call>", "</tool_call>"))

    @staticmethod
    def fits(tokenizer: Tokenizer) -> bool:
        return "<tool_call>" in (tokenizer.chat_template or "")

    def variables(self, effort: str) -> dict[str, Any]:
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}

    def parser(self, prompt: str) -> LaneParser:
        thinking = prompt.rstrip().endswith("<think>")
        return LaneParser(
            Lane.THINKING if thinking else Lane.BETWEEN,
            opens=_OPENS,
            closes=_CLOSES,
            calls=CallReader(name_keys=("name",), argument_keys=("arguments", "parameters")),
        )
