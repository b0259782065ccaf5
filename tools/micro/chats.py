"""Conversations made from the text itself, so that the model learns North's chat format and to end its turn.

Everything said is a function of the library or a fact about one: no other text and no other model is used. A
sample is a prompt, as the chat template renders it, and the completion that the model should learn.
"""

from __future__ import annotations

import ast
import json
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.model import markers
from headrace.model.tokenizer import Tokenizer
from tools.micro.text import SourceFile

LONGEST_SOURCE = 1500
IDENTITY = "I am North Micro, a very small language model trained on Python's standard library."
_GREETINGS = ("Hello", "Hi", "Who are you?", "What is your name?", "What can you do?", "Introduce yourself.")


@dataclass(frozen=True, slots=True)
class Function:
    """A documented function of the library: its name, parameters, first docstring paragraph and source."""

    name: str
    parameters: tuple[str, ...]
    summary: str
    source: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation up to the model's turn, what the template is told, and the turn itself."""

    messages: tuple[dict[str, Any], ...]
    reasoning: bool
    thought: str
    answer: str
    tools: tuple[dict[str, Any], ...] = ()

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.apply_chat_template(
            self.messages, tools=self.tools or None, reasoning=self.reasoning
        )

    def completion(self) -> str:
        """What follows the generation prompt, markers included."""
        thinking = f"{self.thought}{markers.END_THINKING}" if self.reasoning else ""
        return f"{thinking}{self.answer}{markers.END_OF_TURN}"


def functions(files: Iterable[SourceFile]) -> Iterator[Function]:
    """The documented functions and methods of `files` that are short enough to be an answer."""
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the library's own tests hold odd escapes on purpose
                tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            continue
        lines = file.text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                source = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
                parameters = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
                summary = " ".join(documentation.split("\n\n")[0].split())
                if len(source) <= LONGEST_SOURCE and 8 <= len(summary) <= 200:
                    yield Function(node.name, parameters, summary, source)


def make_chats(files: Iterable[SourceFile], count: int, seed: int) -> list[Chat]:
    """About `count` conversations: half ask for code, a fifth for an explanation, the rest use tools."""
    dice = random.Random(seed)
    known = list(functions(files))
    dice.shuffle(known)
    chats = [_introduction(dice) for _ in range(max(1, count // 100))]
    for index, function in enumerate(known[:count]):
        share = index % 10
        if share < 5:
            chats.append(_write(function, dice))
        elif share < 7:
            chats.append(_explain(function, dice))
        else:
            chats.append(_use_tool(function, dice.sample(known, 2), dice))
    return chats


def _text(answer: str) -> str:
    return f"{markers.START_TEXT}{answer}{markers.END_TEXT}"


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _takes(function: Function) -> str:
    return " and ".join(function.parameters) if function.parameters else "no arguments"


def _introduction(dice: random.Random) -> Chat:
    thought = "The user wants to know who I am."
    return Chat((_said(dice.choice(_GREETINGS)),), dice.random() < 0.5, thought, _text(IDENTITY))


def _write(function: Function, dice: random.Random) -> Chat:
    parameters = ", ".join(function.parameters)
    request = dice.choice(
        (
            f"Write the function `{function.name}`: {function.summary}",
            f"Write a Python function `{function.name}({parameters})`. {function.summary}",
            f"Implement `{function.name}` in Python. {function.summary}",
        )
    )
    thought = f"The user wants the function {function.name}. It takes {_takes(function)}."
    answer = _text(f"```python\n{function.source}\n```")
    return Chat((_said(request),), dice.random() < 0.5, thought, answer)


def _explain(function: Function, dice: random.Random) -> Chat:
    code = function.source.replace('"""', "'''").split("'''")
    bare = code[0].rstrip() + code[2] if len(code) == 3 else code[0]
    request = f"What does this function do?\n\n```python\n{bare.strip()}\n```"
    thought = f"This is the function {function.name}, which takes {_takes(function)}."
    return Chat((_said(request),), dice.random() < 0.5, thought, _text(function.summary))


def _use_tool(function: Function, others: list[Function], dice: random.Random) -> Chat:
    """A request to call a tool; half of the time the call is past and its result is to be told."""
    arguments = {name: _value(name, dice) for name in function.parameters[:3]}
    listed = [_tool(function, arguments), *(_tool(other, {}) for other in others[: dice.randrange(3)])]
    dice.shuffle(listed)
    told = " and ".join(f"{name} = {json.dumps(value)}" for name, value in arguments.items())
    request = _said(f"Call `{function.name}` with {told or 'no arguments'}.")
    thought = f"I should call {function.name}."
    if dice.random() < 0.5:
        call = json.dumps(arguments, ensure_ascii=False)
        action = f'[\n    {{"tool_call_id": "0", "tool_name": "{function.name}", "parameters": {call}}}\n]'
        answer = f"{markers.START_ACTION}{action}{markers.END_ACTION}"
        return Chat((request,), dice.random() < 0.7, thought, answer, tuple(listed))
    result = str(_value(function.name, dice))
    called = {"id": "0", "function": {"name": function.name, "arguments": arguments}}
    past = {"role": "assistant", "reasoning": thought, "content": None, "tool_calls": [called]}
    messages = (request, past, {"role": "tool", "tool_call_id": "0", "content": result})
    answer = _text(f"The result of `{function.name}` is {result}.")
    return Chat(messages, dice.random() < 0.7, f"The result is {result}.", answer, tuple(listed))


def _value(name: str, dice: random.Random) -> int | str:
    return dice.randrange(1000) if dice.random() < 0.5 else f"{name}{dice.randrange(100)}"


def _tool(function: Function, arguments: dict[str, int | str]) -> dict[str, Any]:
    kinds = {name: "integer" if isinstance(value, int) else "string" for name, value in arguments.items()}
    schema = {
        "type": "object",
        "properties": {name: {"type": kinds.get(name, "string")} for name in function.parameters[:3]},
        "required": list(function.parameters[:3]),
    }
    description = function.summary.replace('"', "'")
    return {
        "type": "function",
        "function": {"name": function.name, "description": description, "parameters": schema},
    }
