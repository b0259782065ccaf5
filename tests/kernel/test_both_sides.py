"""What Python and the sources for the GPU both have is alike: operations, enumerations, constants."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from headrace.kernel.build import INCLUDE
from headrace.kernel.launcher import COUNTER_WORDS
from headrace.kernel.prompt import passes
from headrace.kernel.records import ABSENT
from headrace.kernel.trace import Lane
from headrace.kernel.watchdog import Agent, Waited
from headrace.model.sampler import NO_TOKEN
from headrace.step import shared_memory
from headrace.step.isa import Opcode
from headrace.step.oracle import twins

TWINS = Path(twins.__file__).parent


def members(source: str, name: str) -> dict[str, int]:
    """The members of an enumeration of a header by their names, each of which has its number beside it."""
    [body] = re.findall(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}}", source, re.DOTALL)
    return {member: int(number) for member, number in re.findall(r"(\w+) = (\d+)", body)}


@pytest.mark.parametrize(
    ("header", "kind", "more"),
    [("wait.h", Agent, set()), ("wait.h", Waited, set()), ("trace.h", Lane, {"LANES"})],
)
def test_both_sides_say_the_same(header: str, kind: type[IntEnum], more: set[str]) -> None:
    found = members((INCLUDE / header).read_text(), kind.__name__)
    assert {name: found[name] for name in found.keys() - more} == {one.name: one.value for one in kind}
    assert all(found[name] == len(kind) for name in more), "how many there are"


def constant(source: str, name: str) -> int:
    """The value of a constant of a source."""
    [value] = re.findall(rf"^constexpr int {name} = (-?\d+);", source, re.MULTILINE)
    return int(value)


def test_every_operation_has_a_header_and_a_twin_of_its_name() -> None:
    names = {opcode.name.lower() for opcode in Opcode if opcode is not Opcode.END}
    assert {path.stem for path in TWINS.glob("*.py")} - {"__init__"} == names
    headers = {path.stem for path in (INCLUDE / "ops").glob("*.h")}
    assert names - headers == {"expert_up", "ffn_up"}, "these two share gated.h"
    assert headers - names == {"gated", "normed", "residual"}, "what several have in common"


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("state.h", "COUNTER_WORDS", COUNTER_WORDS),
        ("state.h", "CONSUMER_WARPS", shared_memory._CONSUMER_WARPS),
        ("state.h", "MESSAGES", shared_memory._MESSAGES),
        ("state.h", "ORDERS", shared_memory._ORDERS),
        ("sampling.h", "NO_TOKEN", NO_TOKEN),
        ("ops/sample_commit.h", "ABSENT", ABSENT),
    ],
)
def test_constants_of_the_kernel(header: str, name: str, value: int) -> None:
    assert constant((INCLUDE / header).read_text(), name) == value


def test_constants_of_the_steps_of_prompts() -> None:
    source = passes.SOURCE.read_text()
    assert constant(source, "SLOTS") == passes._SLOTS
    assert constant(source, "MOST_PARTS") == passes._MOST_PARTS


def test_another_number_or_name_is_seen() -> None:
    source = (
        "enum class Agent : int32_t { LOADER = 0, CONSUMER = 1,\n  COPIER = 3 };\nconstexpr int SLOTS = 5;\n"
    )
    assert members(source, "Agent") == {"LOADER": 0, "CONSUMER": 1, "COPIER": 3}
    assert constant(source, "SLOTS") == 5
