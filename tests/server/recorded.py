"""A task in two turns, in the shape that each client sends it.

The shapes were seen on the wire; the texts are shortened. `turns` gives the bodies of the first and of the
second turn, the second made from what the server answered to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
RESULT = "a.py:1: print(1)"


def _function(**extra: Any) -> Body:
    function = {"name": "bash", "description": "Run a command", "parameters": SCHEMA, **extra}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Recorded:
    """One client. `second` takes the first turn's answer and gives the messages to add."""

    path: str
    first: Body
    second: Callable[[Body], list[Body]]
    history: str = "messages"
    wants_tools: bool = True

    def next_body(self, answer: Body) -> Body:
        return {**self.first, self.history: [*self.first[self.history], *self.second(answer)]}


def _chat(message: Body, **fields: Any) -> list[Body]:
    """The assistant's message with its call, then the result, as chat clients write them."""
    calls = [{key: call[key] for key in ("id", "type", "function")} for call in message["tool_calls"]]
    said = {"role": "assistant", "tool_calls": calls, **fields}
    return [said, {"role": "tool", "tool_call_id": calls[0]["id"], "content": RESULT}]


def _parts(text: str) -> list[Body]:
    return [{"type": "text", "text": text}]


OPENCODE = Recorded(
    "/v1/chat/completions",
    {
        "model": "scripted",
        "max_tokens": 400,
        "messages": [
            {"role": "system", "content": "You are OpenCode."},
            {"role": "user", "content": "What does a.py print?"},
        ],
        "tools": [
            _function(
                parameters={
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **SCHEMA,
                    "properties": {
                        "command": {"type": "string"},
                        "timeout": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                    },
                    "additionalProperties": False,
                }
            )
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    lambda answer: _chat(answer, content="", reasoning_content=answer["reasoning"]),
)

PI = Recorded(
    "/v1/chat/completions",
    {
        "model": "scripted",
        "messages": [
            {"role": "developer", "content": "You are pi."},
            {"role": "user", "content": _parts("What does a.py print?")},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": False,
        "max_completion_tokens": 400,
        "reasoning_effort": "medium",
        "tools": [_function(strict=False)],
    },
    lambda answer: _chat(answer, content=None, reasoning=answer["reasoning"]),
)

QWEN_CODE = Recorded(
    "/v1/chat/completions",
    {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": _parts("You are Qwen Code.")},
            {"role": "user", "content": [*_parts("Context."), *_parts("What does a.py print?")]},
        ],
        "max_tokens": 400,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [_function()],
    },
    lambda answer: [
        message | ({"content": _parts(RESULT)} if message["role"] == "tool" else {})
        for message in _chat(answer, content=None)
    ],
)

LITELLM = Recorded(
    "/v1/chat/completions",
    {
        "model": "scripted",
        "messages": [{"role": "user", "content": "What does a.py print?"}],
        "tools": [_function()],
        "reasoning_effort": "high",
        "extra_body": {},
    },
    lambda answer: _chat(answer, reasoning_content=answer["reasoning"]),
)

MINI_SWE_AGENT = Recorded(
    "/v1/chat/completions",
    {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "You can run commands."},
            {"role": "user", "content": "What does a.py print?"},
        ],
        "tools": [_function()],
    },
    lambda answer: _chat(answer),
)

AIDER = Recorded(
    "/v1/chat/completions",
    {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "Act as an expert. Answer with SEARCH/REPLACE blocks."},
            {"role": "user", "content": "Change x."},
            {"role": "assistant", "content": "a.py\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE"},
            {"role": "user", "content": "I switched to a new code base."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": "What does a.py print?"},
        ],
        "stream": True,
        "temperature": 0,
    },
    lambda answer: [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": "Thanks."},
    ],
    wants_tools=False,
)


def _claude_second(answer: Body) -> list[Body]:
    use = next(block for block in answer["content"] if block["type"] == "tool_use")
    result = {
        "tool_use_id": use["id"],
        "type": "tool_result",
        "content": RESULT,
        "is_error": False,
        "cache_control": {"type": "ephemeral"},
    }
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


CLAUDE_CODE = Recorded(
    "/v1/messages?beta=true",
    {
        "model": "scripted",
        "max_tokens": 400,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=abcde;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                    {"type": "text", "text": "What does a.py print?", "cache_control": {"type": "ephemeral"}},
                ],
            }
        ],
        "tools": [{"name": "bash", "description": "Run a command", "input_schema": SCHEMA}],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    },
    _claude_second,
)


def _codex_second(answer: Body) -> list[Body]:
    call = next(item for item in answer["output"] if item["type"] == "function_call")
    return [*answer["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}]


CODEX = Recorded(
    "/v1/responses",
    {
        "model": "scripted",
        "instructions": "You are Codex.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "What does a.py print?"}],
            },
        ],
        "tools": [
            {
                "type": "function",
                "name": "bash",
                "description": "Run a command",
                "strict": False,
                "parameters": SCHEMA,
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x": "y"},
    },
    _codex_second,
    history="input",
)

CLIENTS = {
    "OpenCode": OPENCODE,
    "pi": PI,
    "qwen-code": QWEN_CODE,
    "LiteLLM": LITELLM,
    "mini-swe-agent": MINI_SWE_AGENT,
    "aider": AIDER,
    "Claude Code": CLAUDE_CODE,
    "Codex": CODEX,
}
