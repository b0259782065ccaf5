"""The rooms import in one direction, and no file grows past what one sitting can read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("model", "step", "kernel", "engine", "server")
MOST_LINES = 450
FILES = sorted((ROOT / "headrace").rglob("*.py"))


def imported_rooms(source: str) -> set[str]:
    """The rooms of headrace that a module imports from."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    parts = (name.split(".") for name in names)
    return {part[1] for part in parts if part[0] == "headrace" and len(part) > 1 and part[1] in ROOMS}


def backward_imports(room: str, source: str) -> set[str]:
    return {other for other in imported_rooms(source) if ROOMS.index(other) > ROOMS.index(room)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_never_point_backwards(path: Path) -> None:
    room = path.relative_to(ROOT / "headrace").parts[0]
    if room in ROOMS:
        assert not backward_imports(room, path.read_text())


def test_a_backward_import_is_seen() -> None:
    assert backward_imports("model", "from headrace.engine.backend import DecodeRow") == {"engine"}
    assert backward_imports("engine", "import headrace.server.app") == {"server"}
    assert not backward_imports("engine", "from headrace.model.kv import KVCache")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
