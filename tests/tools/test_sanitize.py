"""`tools.sanitize`, with a script in compute-sanitizer's place and the oracle in the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.kernel import build
from headrace.step.isa import ROW_CAPACITIES, Buffer
from tests.kernel.check.fakes import kernel
from tools import sanitize

SUMMARY = "echo ========= ERROR SUMMARY: 0 errors"
# As racecheck writes, of code with line information and without.
REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at decode+0xf2d0 in /tmp/headrace-a/gemm.h:188
=========     and Read access at decode+0xf630 in /tmp/headrace-a/gemm.h:214 [17880 hazards]
=========     and Read access at decode+0xf640 in /tmp/headrace-a/gemm.h:214 [11040 hazards]
=========     and Read access at decode+0xe6b0 in /tmp/headrace-a/ops/normed.h:33 [16 hazards]
=========
========= Error: Race reported between Read access at decode+0xf630 in /tmp/headrace-a/gemm.h:214
=========     and Write access at decode+0xf2e0 in /tmp/headrace-a/gemm.h:188 [80 hazards]
=========
========= Warning: Race reported between Write access at decode+0x3c20
=========     and Write access at decode+0x3cc0 [8 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""


def sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """The only compute-sanitizer there is, and the file in which it writes down what it is told."""
    log = folder / "log"
    script = folder / "compute-sanitizer"
    told = f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {log}'
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo Version 2025.3\n{told}\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_memcheck_and_racecheck_unless_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = sanitizer(tmp_path, monkeypatch, SUMMARY)
    sanitize.main([])
    sanitize.main(["--tool", "synccheck", "--rows", "16", "--steps", "2"])
    lines = log.read_text().splitlines()
    assert [line.split()[1:3] for line in lines] == [
        ["--tool", name] for name in ("memcheck", "racecheck", "synccheck")
    ]
    assert all(line.startswith("1 ") for line in lines)
    asked = [line.partition("-m tools.sanitize ")[2] for line in lines]
    assert asked == ["--launch --rows 4 --steps 3"] * 2 + ["--launch --rows 16 --steps 2"]
    assert capfd.readouterr().out.count("Version 2025.3") == 2


def test_an_error_that_is_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer(tmp_path, monkeypatch, f'{SUMMARY}; [ "$2" = racecheck ] || exit {sanitize.FOUND}')
    with pytest.raises(SystemExit, match="errors were found by memcheck and synccheck"):
        sanitize.main(["--tool", "memcheck", "--tool", "racecheck", "--tool", "synccheck"])


def test_what_racecheck_finds_is_told_by_lines_and_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = sanitizer(tmp_path, monkeypatch, f"cat <<'EOF'\n{REPORT}EOF")
    sanitize.main(["--tool", "racecheck"])
    assert "--error-exitcode" not in log.read_text()  # or it would stand before that of what is run
    told = capsys.readouterr().out
    assert REPORT in told
    assert told.endswith(
        "3 pairs of accesses that racecheck sees no order between\n"
        "   29,000  read gemm.h:214, write gemm.h:188\n"
        "       16  read normed.h:33, write gemm.h:188\n"
        "        8  write decode+0x3c20, write decode+0x3cc0\n"
    )


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_a_launch_that_fails_is_not_taken_for_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    sanitizer(tmp_path, monkeypatch, f"{SUMMARY}; exit 1")
    with pytest.raises(SystemExit, match=f"{tool}: exit code 1"):
        sanitize.main(["--tool", tool])
    sanitizer(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(SystemExit, match=f"{tool} has not come to its summary"):
        sanitize.main(["--tool", tool])


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


@pytest.mark.parametrize("rows", ROW_CAPACITIES)
def test_what_is_run_passes_if_it_is_right(rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    sanitize.launch(rows, 2, kernel(), "cpu", 3)
    assert "of 2 steps, wrong tokens: 0" in capsys.readouterr().out


def test_what_is_run_fails_if_it_is_wrong() -> None:
    with pytest.raises(SystemExit, match="tokens are wrong"):
        sanitize.launch(4, 2, kernel(shift=1), "cpu", 3)
    with pytest.raises(SystemExit, match="buffers are wrong"):
        sanitize.launch(
            4, 2, kernel(spoil=lambda buffer, left: left * (1 + 0.05 * (buffer is Buffer.X))), "cpu", 3
        )


@pytest.mark.skipif(not build.has_compiler(), reason="cuda.core and NVRTC are not installed")
def test_lines_are_in_the_binary_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    source = '#include "line.h"\n'
    headers = {"line.h": 'extern "C" __global__ void f(int* to) { *to = 1; }\n'}
    plain, _ = build.compile_source(source, headers)
    assert b"line.h" not in plain
    monkeypatch.setitem(build.OPTIONS, "lineinfo", True)
    lined, _ = build.compile_source(source, headers)
    assert b"line.h" in lined
