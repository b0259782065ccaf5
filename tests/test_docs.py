"""Every link of the documentation leads somewhere, headings too; tests, commands and options in it exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from headrace.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "models").glob("*/*.md")])
LINK = re.compile(r"\]\(([^)#]+)")
ANCHOR = re.compile(r"\]\(([^)#]*)#([^)]+)\)")
CODE = re.compile(r"`([^`]+)`|^ {4}([^\n]+)$", re.MULTILINE)  # what is to be typed, in a line or apart
OPTION = re.compile(r"--[a-z][a-z-]*")
OTHERS = {"clients.md", "performance-log.md"}  # options of other programs, and of tools as they were
TEST = re.compile(r"\[`(test_\w+)`\]\(([^)#]+)")


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links of a page in `folder` that lead nowhere."""
    links = [link for link in LINK.findall(text) if not link.startswith(("http:", "https:"))]
    return [link for link in links if not (folder / link).exists()]


def slug(heading: str) -> str:
    """What a heading is called in links, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def lost_headings(text: str, page: Path) -> list[str]:
    """Headings that links of `page` lead to, of its own and of other pages, and that are not there."""
    lost = []
    for link, anchor in ANCHOR.findall(text):
        if not link.startswith(("http:", "https:")):
            target = (page.parent / link).read_text() if link else text
            headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", target, re.MULTILINE)}
            lost += [anchor] if anchor not in headings else []
    return lost


def lost_tests(text: str, folder: Path) -> list[str]:
    """Tests that a page in `folder` names by links to their files, and that are not there."""
    return [name for name, link in TEST.findall(text) if f"def {name}(" not in (folder / link).read_text()]


def options(*names: str) -> set[str] | None:
    """The options of a command of headrace, with those of commands below it; None if there is none such."""
    command: Any = get_command(app)
    for name in names:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            return None
    below = [options(*names, name) or set() for name in getattr(command, "commands", {})]
    return {name for parameter in command.params for name in parameter.opts}.union(*below)


def unknown_commands(text: str) -> list[str]:
    """What a page tells to type and is not there: commands, their options, targets of make, modules."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = []
    for code in ("".join(found) for found in CODE.findall(text)):
        program, *words = code.removeprefix(".venv/bin/").partition("#")[0].split() or [""]
        match program, words:
            case "headrace", [first, *rest] if first[0].islower():
                group = rest[:1] if first in ("plan", "bench") else []
                known = options(first, *group)
                if known is None or set(OPTION.findall(" ".join(words))) - known:
                    unknown.append(code)
            case "make", [target, *_] if target not in targets:
                unknown.append(code)
            case "python", ["-m", module, *_] if module.startswith("tools."):
                path = ROOT.joinpath(*module.split("."))
                unknown += [] if path.with_suffix(".py").exists() or path.is_dir() else [code]
    return unknown


def unknown_options(text: str) -> set[str]:
    """Options that a page names by themselves and that neither headrace nor a tool has."""
    named = {option for code in re.findall(r"`(--[^`]+)`", text) for option in OPTION.findall(code)}
    tools = "".join(file.read_text() for file in sorted((ROOT / "tools").rglob("*.py")))
    return named - (options() or set()) - set(re.findall(r'"(--[a-z-]+)"', tools))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page.read_text(), page.parent)
    assert not lost_headings(page.read_text(), page)
    assert not lost_tests(page.read_text(), page.parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_to_be_typed_exists(page: Path) -> None:
    assert not unknown_commands(page.read_text())
    assert page.name in OTHERS or not unknown_options(page.read_text())


def test_a_wrong_command_is_seen() -> None:
    typed = (
        *("headrace bench speed", "headrace serve x --prot 1", "headrace plan show --json y"),
        *("make tests", "python -m tools.time_nothing --x"),
    )
    right = "`headrace bench decode --json y`, `make test-gpu`, `python -m tools.time_gaps`, `--kept 3`"
    assert unknown_commands(right + "".join(f"\n    {code}" for code in typed)) == list(typed)
    assert unknown_options(f"{right} `--keep-kept`") == {"--keep-kept"}


def test_a_broken_link_is_seen() -> None:
    assert broken_links("see [here](nowhere.md) and [there](README.md)", ROOT) == ["nowhere.md"]


def test_a_lost_heading_is_seen() -> None:
    here = "# `headrace` says: what?\n[a](#headrace-says-what) [b](#nothing)"
    there = "[c](CONTRIBUTING.md#working-on-headrace) [d](CONTRIBUTING.md#playing-with-headrace)"
    assert lost_headings(f"{here} {there}", ROOT / "README.md") == ["nothing", "playing-with-headrace"]


def test_a_lost_test_is_seen() -> None:
    links = "[`test_gone`](tests/test_docs.py), [`test_a_lost_test_is_seen`](tests/test_docs.py)"
    assert lost_tests(links, ROOT) == ["test_gone"]
