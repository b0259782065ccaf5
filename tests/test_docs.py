"""Every link of the documentation leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "models").glob("*/*.md")])
LINK = re.compile(r"\]\(([^)#]+)")


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links of a page in `folder` that lead nowhere."""
    links = [link for link in LINK.findall(text) if not link.startswith(("http:", "https:"))]
    return [link for link in links if not (folder / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page.read_text(), page.parent)


def test_a_broken_link_is_seen() -> None:
    assert broken_links("see [here](nowhere.md) and [there](README.md)", ROOT) == ["nowhere.md"]
