"""`tools.sanitize`, with a script in compute-sanitizer's place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import sanitize


def sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """The only compute-sanitizer there is, and the file in which it writes down what it is told."""
    log = folder / "log"
    script = folder / "compute-sanitizer"
    script.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {log}\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_memcheck_and_racecheck_unless_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sanitizer(tmp_path, monkeypatch, "exit 0")
    sanitize.main([])
    sanitize.main(["--tool", "synccheck"])
    lines = log.read_text().splitlines()
    assert [line.split()[1:3] for line in lines] == [
        ["--tool", name] for name in ("memcheck", "racecheck", "synccheck")
    ]
    assert all(line.startswith("1 ") and line.endswith("-m tools.sanitize --launch") for line in lines)


def test_an_error_that_is_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer(tmp_path, monkeypatch, f'[ "$2" = memcheck ] || exit {sanitize.FOUND}')
    with pytest.raises(SystemExit, match="errors were found by racecheck"):
        sanitize.main([])


def test_a_launch_that_fails_is_not_taken_for_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(SystemExit, match="memcheck: exit code 1"):
        sanitize.main([])


def test_where_there_is_none_it_says_how_to_come_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-sanitizer-api"):
        sanitize.main([])
    packaged = tmp_path / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    packaged.parent.mkdir(parents=True)
    packaged.write_text("#!/bin/sh\n")
    packaged.chmod(0o755)
    assert sanitize.sanitizer() == str(packaged)
