"""Every link of the documentation leads somewhere, headings too, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "models").glob("*/*.md")])
LINK = re.compile(r"\]\(([^)#]+)")
ANCHOR = re.compile(r"\]\(([^)#]*)#([^)]+)\)")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page.read_text(), page.parent)
    assert not lost_headings(page.read_text(), page)
    assert not lost_tests(page.read_text(), page.parent)


def test_a_broken_link_is_seen() -> None:
    assert broken_links("see [here](nowhere.md) and [there](README.md)", ROOT) == ["nowhere.md"]


def test_a_lost_heading_is_seen() -> None:
    here = "# `headrace` says: what?\n[a](#headrace-says-what) [b](#nothing)"
    there = "[c](CONTRIBUTING.md#working-on-headrace) [d](CONTRIBUTING.md#playing-with-headrace)"
    assert lost_headings(f"{here} {there}", ROOT / "README.md") == ["nothing", "playing-with-headrace"]


def test_a_lost_test_is_seen() -> None:
    links = "[`test_gone`](tests/test_docs.py), [`test_a_lost_test_is_seen`](tests/test_docs.py)"
    assert lost_tests(links, ROOT) == ["test_gone"]
