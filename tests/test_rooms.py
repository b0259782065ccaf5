"""The rooms import in one direction, and no file grows past what one sitting can read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The rooms in their order, and among and after them what stands on them.
ROOMS = ("model", "step", "kernel", "engine", "load", "server", "llm", "client", "bench", "cli")
MOST_LINES = 450
FILES = sorted((ROOT / "headrace").rglob("*.py"))


def imported_rooms(source: str) -> set[str]:
    """The rooms of headrace that a module imports from. Raises ValueError for a relative import."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno} has a relative import: write it from headrace on")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    parts = (name.split(".") for name in names)
    return {part[1] for part in parts if part[0] == "headrace" and len(part) > 1 and part[1] in ROOMS}


def backward_imports(room: str, source: str) -> set[str]:
    return {other for other in imported_rooms(source) if ROOMS.index(other) > ROOMS.index(room)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_never_point_backwards(path: Path) -> None:
    room = path.relative_to(ROOT / "headrace").parts[0].removesuffix(".py")
    if room != "__init__":  # which has what users import from every room
        assert not backward_imports(room, path.read_text())


def test_a_backward_import_is_seen() -> None:
    assert backward_imports("model", "from headrace.engine.backend import DecodeRow") == {"engine"}
    assert backward_imports("engine", "import headrace.server.app") == {"server"}
    assert backward_imports("step", "from headrace import model, kernel") == {"kernel"}
    assert backward_imports("engine", "def f():\n    from headrace.load import load") == {"load"}
    with pytest.raises(ValueError, match="line 1 has a relative import"):
        backward_imports("step", "from ..engine import text")
    assert not backward_imports("engine", "from headrace.model.kv import KVCache")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
