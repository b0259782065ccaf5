"""Where figures come from."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from headrace.bench import results


def test_origin_names_what_a_reader_needs_to_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_COMMIT", raising=False)
    about = results.origin("make it so")
    assert list(about) == ["date", "machine", "commit", "command", "versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"])
    assert about["command"] == "make it so"
    assert {"python", "torch"} <= set(about["versions"])
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown", about["commit"])


def test_a_commit_can_be_told_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_COMMIT", "abc")
    assert results.commit() == "abc"
    monkeypatch.delenv("HEADRACE_COMMIT")
    monkeypatch.setattr(results, "_git", lambda *arguments: None)
    assert results.commit() == "unknown"


def test_a_changed_checkout_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_COMMIT", raising=False)
    said = {"rev-parse": "123", "status": " M file"}
    monkeypatch.setattr(results, "_git", lambda command, *_: said[command])
    assert results.commit() == "123+"
    said["status"] = ""
    assert results.commit() == "123"


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/headrace", "check"])
    assert results.command_line() == "headrace check"
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py", "bench", "a b"])
    for module in ("headrace.cli.__main__", "tools.time_gaps"):
        main.__spec__ = ModuleSpec(module, None)
        typed = module.removesuffix(".__main__")
        assert results.command_line() == f"python -m {typed} bench 'a b'"


def test_a_file_is_written_whole_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    results.write(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]
