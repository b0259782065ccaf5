"""The training text: Python's standard library, as a list of files without duplicates and without tables."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# One file in 20 is held out, chosen by the hash of its path: the choice survives changes to other files.
HELD_OUT_BELOW = 256 // 20
# Larger files are generated tables or the pydoc topics.
LARGEST_FILE = 400_000
# A file with fewer letters than this is mostly numbers and escapes: character maps, encoded test data.
LEAST_LETTERS = 0.40

_LETTER = re.compile(r"[A-Za-z]")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the text; `path` is relative to the library's folder."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.path.encode()).digest()[0] < HELD_OUT_BELOW


def library_folder() -> Path:
    """The standard library of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def read_library(folder: Path) -> list[SourceFile]:
    """The Python files under `folder` in order of their paths, each text once.

    Third-party packages, files that are not UTF-8 and tables are left out.
    """
    seen: set[bytes] = set()
    files = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if "site-packages" in name or path.stat().st_size > LARGEST_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen and is_prose_or_code(text):
            seen.add(digest)
            files.append(SourceFile(name, text))
    return files


def is_prose_or_code(text: str) -> bool:
    """Whether `text` is worth learning: long enough, and made of words rather than of numbers."""
    solid = sum(not character.isspace() for character in text)
    return solid >= 64 and len(_LETTER.findall(text)) >= LEAST_LETTERS * solid
