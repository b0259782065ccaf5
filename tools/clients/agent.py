"""A small coding agent over a client library, run by that library's own Python: agent.py openai|litellm TASK.

openai: streamed chat completions. litellm: whole ones. The model is in the environment, as MODEL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MOST_TURNS = 8
TOOLS: dict[str, dict[str, Any]] = {
    "read_file": {"path": {"type": "string"}},
    "write_file": {"path": {"type": "string"}, "content": {"type": "string"}},
    "run_command": {"command": {"type": "string"}},
}


def offers() -> Any:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Use this to {name.replace('_', ' ')}.",
                "parameters": {"type": "object", "properties": fields, "required": list(fields)},
            },
        }
        for name, fields in TOOLS.items()
    ]


def use(name: str, given: dict[str, str]) -> str:
    """Run a tool; its result as text."""
    if name == "read_file":
        return Path(given["path"]).read_text()
    if name == "write_file":
        return f"{Path(given['path']).write_text(given['content'])} characters written"
    run = subprocess.run(
        given["command"], shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    return f"{run.stdout}{run.stderr}exit code {run.returncode}"


def ask_openai(messages: Any) -> dict[str, Any]:
    from openai import OpenAI

    with OpenAI(max_retries=0).chat.completions.stream(
        model=os.environ["MODEL"], messages=messages, tools=offers(), stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        whole: dict[str, Any] = stream.get_final_completion().choices[0].message.to_dict()
    return whole


def ask_litellm(messages: list[dict[str, Any]]) -> dict[str, Any]:
    import litellm

    reply = litellm.completion(model=os.environ["MODEL"], messages=messages, tools=offers(), num_retries=0)
    whole: dict[str, Any] = reply.choices[0].message.model_dump(exclude_none=True)
    return whole


def main() -> int:
    import json

    ask = {"openai": ask_openai, "litellm": ask_litellm}[sys.argv[1]]
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[2]}]
    for _ in range(MOST_TURNS):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"])
            return 0
        for call in message["tool_calls"]:
            result = use(call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(f"no end after {MOST_TURNS} turns", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
