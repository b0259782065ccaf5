"""What the scripted model says, decided by its prompt alone, as a real model would decide.

The task is always the same: `adder.py` subtracts where it should add. The script finds the file's path in
the prompt, chooses from the tools that the prompt offers, fills in their arguments by their schemas, and
knows how far it is by the calls that the prompt already holds:

    look at the file, mend it, run the check, report what the check printed

An agent without tools that asks for SEARCH/REPLACE blocks (aider) gets a wrong one first, so that it has to
come back with what its own check printed. Anything else without tools gets a title.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.model import markers

BROKEN = 'def add(a, b):\n    """The sum of a and b."""\n    return a - b\n'
MENDED = BROKEN.replace("a - b", "a + b")
CHECK = """import sys

sys.dont_write_bytecode = True  # a file mended within its second of time would look like the old one
from adder import add

print("add(2, 3) =", add(2, 3))
sys.exit(add(2, 3) != 5)
"""
REPORT = "Mended ✓ add(2, 3) is now {result}."
TITLE = "Mend the adder"

_TOOL = re.compile(r'^    \{"name": "([^"\n]+)", "description": "', re.M)
_SCHEMA = re.compile(r'", "parameters": (?=\{)')
_RESULT = re.compile(r"add\(2, 3\) = (-?\d+)")
_PATH = re.compile(r"(/[^\s\"'`]*)/adder\.py")

# Tools as clients name them, in lower case and without separators.
_READERS = ("read", "readfile", "view")
_EDITORS = ("edit", "editfile", "replace")
_WRITERS = ("write", "writefile")
_SHELLS = ("bash", "shell", "shellcommand", "execcommand", "runshellcommand", "runcommand")
_PATCHERS = ("applypatch",)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the prompt offers; `schema` is that of its arguments."""

    name: str
    schema: Mapping[str, Any]


def answer(prompt: str) -> str:
    """The model's turn after `prompt`, without the end of the turn."""
    thoughts, rest = _turn(prompt)
    if prompt.endswith(markers.START_THINKING):
        return thoughts + markers.END_THINKING + rest
    return rest


def offered(prompt: str) -> list[Tool]:
    """The tools in the first system turn of a prompt in North's format."""
    listed = prompt.partition(markers.END_OF_TURN)[0]
    schemas = ((found[1], _schema(listed, found.end())) for found in _TOOL.finditer(listed))
    return [Tool(name, schema) for name, schema in schemas if schema is not None]


def _schema(listed: str, start: int) -> Mapping[str, Any] | None:
    """The schema of the tool whose description begins at `start`.

    The template writes descriptions as they are, so that they may hold what looks like a schema: the tool's
    own is the one that the rest of its entry follows.
    """
    for found in _SCHEMA.finditer(listed, start):
        try:
            schema, end = json.JSONDecoder().raw_decode(listed, found.end())
        except ValueError:
            continue
        if listed.startswith(', "responses": null}', end):
            return dict(schema)
    return None


def arguments(schema: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that keep to a schema: what it requires, and what it has a place for among `values`."""
    required = schema.get("required", ())
    filled = {
        name: _value(_normal(name), form, values)
        for name, form in schema.get("properties", {}).items()
        if name in required or _normal(name) in values
    }
    return {name: value for name, value in filled.items() if value is not None}


def _turn(prompt: str) -> tuple[str, str]:
    tools = {_normal(tool.name): tool for tool in offered(prompt)}
    steps = _steps(tools)
    turns = prompt.split(markers.CHATBOT)[1:]
    done = sum(markers.START_ACTION in turn for turn in turns)
    if done < len(steps):
        tool, command = steps[done]
        folder = _folder(prompt)
        words = f"Step {done + 1} → then I see."
        return words, _action(tool, _values(folder, command.format(folder=folder)), done)
    if tools:
        return _report(prompt, tools, done, further=done > len(steps))
    if "SEARCH/REPLACE" in prompt:
        return "They want a block.", _text(_block(prompt))
    return "A title will do.", _text(TITLE)


def _report(prompt: str, tools: Mapping[str, Tool], done: int, *, further: bool) -> tuple[str, str]:
    """Words, or, where the prompt names a command that ends the task, that command."""
    found = _RESULT.findall(prompt)
    words = REPORT.format(result=found[-1] if found else "unknown")
    end = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    if end in prompt and not further:
        run = f"echo {end} && echo '{words}'"
        shell = _first(tools, _SHELLS)
        assert shell is not None, f"{end} is a command, but there is no shell"
        return "The check is done.", _action(shell, {"command": run, "cmd": run}, done)
    return "The check is done.", _text(words)


def _steps(tools: Mapping[str, Tool]) -> list[tuple[Tool, str]]:
    """The tool for each step of the task, and what a shell would have to run for it."""
    wanted = (
        ((*_READERS, *_SHELLS), "cat {folder}/adder.py"),
        ((*_EDITORS, *_PATCHERS, *_WRITERS, *_SHELLS), "sed -i 's/a - b/a + b/' {folder}/adder.py"),
        (_SHELLS, "python3 {folder}/check.py"),
    )
    chosen = ((_first(tools, names), command) for names, command in wanted)
    return [(tool, command) for tool, command in chosen if tool is not None]


def _values(folder: str, command: str) -> dict[str, str]:
    """What arguments of any tool can be, by their names in lower case and without separators."""
    path, old, new = f"{folder}/adder.py", "return a - b", "return a + b"
    patch = (
        f"*** Begin Patch\n*** Update File: {path}\n@@\n def add(a, b):\n"
        f'     """The sum of a and b."""\n-    {old}\n+    {new}\n*** End Patch\n'
    )
    return {
        **dict.fromkeys(("filepath", "path", "absolutepath", "file"), path),
        **dict.fromkeys(("oldstring", "oldtext"), old),
        **dict.fromkeys(("newstring", "newtext"), new),
        **dict.fromkeys(("command", "cmd"), command),
        "content": MENDED,
        "input": patch,
        "edits": "",
    }


def _value(name: str, form: Mapping[str, Any], values: Mapping[str, str]) -> Any:
    if form.get("type") == "array":
        items = form.get("items", {})
        if items.get("type") == "object":
            return [arguments(items, values)]
        return ["bash", "-c", values[name]] if name in values else []
    if name in values:
        return values[name]
    if options := form.get("enum"):
        return options[0]
    return {"integer": 1, "number": 1, "boolean": False, "object": {}}.get(form.get("type", ""), "as asked")


def _block(prompt: str) -> str:
    """A SEARCH/REPLACE block: a wrong one first, the right one once the check has failed."""
    old, new = ("a - b", "a * b") if "add(2, 3) = 6" not in prompt else ("a * b", "a + b")
    search, replace = f"<<<<<<< SEARCH\n    return {old}\n", f"=======\n    return {new}\n>>>>>>> REPLACE\n"
    return f"adder.py\n```python\n{search}{replace}```\n"


def _text(words: str) -> str:
    return markers.START_TEXT + words + markers.END_TEXT


def _action(tool: Tool, values: Mapping[str, str], number: int) -> str:
    """A call, numbered as the template numbers those of the prompt."""
    parameters = arguments(tool.schema, values)
    call = {"tool_call_id": f"{number}", "tool_name": tool.name, "parameters": parameters}
    return f"{markers.START_ACTION}[\n    {json.dumps(call, ensure_ascii=False)}\n]{markers.END_ACTION}"


def _folder(prompt: str) -> str:
    found = _PATH.findall(prompt)
    return found[0] if found else "."


def _first(tools: Mapping[str, Tool], names: tuple[str, ...]) -> Tool | None:
    return next((tools[name] for name in names if name in tools), None)


def _normal(name: str) -> str:
    return re.sub(r"[_\-]", "", name).lower()
