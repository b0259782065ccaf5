"""What looks at a GPU are made into, with a fake in the place of `nvidia-smi`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.bench import decode
from headrace.bench.decode import Method, Pool, bench_decode
from headrace.bench.points import parse_point
from headrace.bench.power import Power, Watch, nvidia_smi
from headrace.model.presets import PRESETS
from headrace.step.oracle.rows import LaunchRow
from tests.waiting import until

UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
FREE, CAPPED, BRAKED = (
    "1980, 643.10, 0x0000000000000000",
    "1790, 703.20, 0x0000000000000004",
    "990, 500.00, 0x0000000000000088",
)
HOT = "1700, 600.00, 0x0000000000000068"  # HwSlowdown, SwThermalSlowdown, HwThermalSlowdown


def looked(lines: Sequence[str], begin: float = 0, end: float = 1e9) -> Power | None:
    """What a watch says of lines that come at 0, 1, 2... seconds."""
    seconds = itertools.count()
    came: list[float] = []

    def clock() -> float:
        came.append(float(next(seconds)))
        return came[-1]

    program = f"import time\nprint(*{[*lines, 'the end']!r}, sep='\\n', flush=True)\ntime.sleep(1000)"
    with Watch([sys.executable, "-S", "-c", program], clock=clock) as watch:
        until(lambda: len(came) > len(lines))  # the end was read, so all before it are in the list
        return watch.between(begin, end)


def test_medians_of_the_looks() -> None:
    lines = ["1980, 640, 0x0", "1965, 650.50, 0x0", "1995, 660, 0x0", "1200, 100, 0x1", "1980, 655, 0x0"]
    assert looked(lines) == Power(sm_clock_mhz=1980, watts=650.5, limited=False)


@pytest.mark.parametrize(
    ("lines", "limited"),
    [
        ([FREE] * 8, False),
        ([CAPPED] * 8, True),
        ([CAPPED] * 2 + [FREE] * 6, True),
        ([CAPPED] + [FREE] * 7, False),
        ([BRAKED] * 8, True),
        ([HOT] * 8, False),
    ],
)
def test_limited_for_power_in_a_good_part_of_the_looks(lines: list[str], limited: bool) -> None:
    found = looked(lines)
    assert found is not None
    assert found.limited is limited


def test_only_looks_of_the_time_that_is_asked_about_count() -> None:
    lines = [CAPPED] * 10 + [FREE] * 5 + [CAPPED] * 10
    assert looked(lines, 10, 14) == Power(sm_clock_mhz=1980, watts=643.1, limited=False)
    assert looked(lines, 0, 9) == Power(sm_clock_mhz=1790, watts=703.2, limited=True)


def test_too_few_looks_say_nothing() -> None:
    assert looked([FREE] * 4) is None
    assert looked([FREE] * 20, 3, 6) is None
    assert looked([FREE] * 5) is not None


def test_lines_that_are_no_looks_are_passed_over() -> None:
    garbage = [
        "[N/A], 643.10, 0x0000000000000000",
        "1980, [Unknown Error], 0x0000000000000000",
        "1980, nan, 0x0000000000000000",
        "1980, 643.10, [N/A]",
        "1980, 643.10",
        "",
        'Field "clocks_event_reasons.active" is not a valid field to query.',
    ]
    assert looked(garbage) is None
    assert looked([*garbage, *[CAPPED] * 5]) == Power(sm_clock_mhz=1790, watts=703.2, limited=True)


def test_bytes_that_are_no_text_are_passed_over() -> None:
    program = "import os, time\nos.write(1, b'\\xff\\xfe\\n' + b'1980, 643.10, 0x0\\n' * 5)\ntime.sleep(1000)"
    with Watch([sys.executable, "-c", program]) as watch:
        until(lambda: watch.between(0, float("inf")) is not None)


@pytest.mark.parametrize("command", [["no-such-program"], ["false"]])
def test_without_the_tool_nothing_is_said_and_nothing_fails(command: list[str]) -> None:
    with Watch(command) as watch:
        assert watch.between(0, float("inf")) is None


def test_the_command_names_the_gpu_and_looks_20_times_a_second_at_most() -> None:
    command = nvidia_smi(UUID)
    assert command[0] == "nvidia-smi"
    assert f"--id=GPU-{UUID}" in command
    (loop,) = (part for part in command if part.startswith("--loop-ms="))
    assert int(loop.removeprefix("--loop-ms=")) >= 50


class Kernels:
    """A pool of one kernel, each of whose launches lasts for three more looks that the bench notes."""

    experts_read = 80

    def __init__(self) -> None:
        self.watches: list[Watch] = []

    def prepare(self) -> None: ...

    def launcher(self, rows: int) -> Kernels:
        return self

    def launch(self, rows: Sequence[LaunchRow | None], steps: int) -> Iterator[list[int | None]]:
        lines = self.watches[-1]._lines
        before = len(lines)
        until(lambda: len(lines) >= before + 3)
        for _ in range(steps):
            yield [7 for _ in rows]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A GPU that only pretends in the place of what the bench takes to be one."""
    kernels = Kernels()

    def watch(command: Sequence[str]) -> Watch:
        kernels.watches.append(Watch(command))
        return kernels.watches[-1]

    monkeypatch.setattr(decode, "Watch", watch)
    monkeypatch.setattr(decode, "hopper", lambda: None)
    monkeypatch.setattr(decode, "Pool", lambda config, points, method, _: Pool(config, points, method, "cpu"))
    monkeypatch.setattr("headrace.step.pack.pack_synthetic", lambda *_, **__: None)
    monkeypatch.setattr("headrace.kernel.pool.KernelPool", lambda *_, **__: kernels)
    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return kernels


def fake_nvidia_smi(folder: Path, line: str) -> None:
    """A program of this name that prints `line` for the GPU of UUID over and over."""
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = "--id=GPU-{UUID}" ] || exit 6\necho $$ > {folder}/process\n'
        f"while :; do echo '{line}'; sleep 0.01; done\n"
    )
    program.chmod(0o755)


def bench(launches: int = 4) -> list[decode.Measured]:
    method = Method(launches=launches, warm_up=1, steps=2)
    points = [parse_point("1x100"), parse_point("2x100")]
    return list(bench_decode(PRESETS["north-micro-shape"], points, bandwidth=1e9, method=method))


def test_the_bench_watches_the_gpu_that_it_measures(tmp_path: Path, kernels: Kernels) -> None:
    fake_nvidia_smi(tmp_path, CAPPED)
    for result in bench():
        found = result.as_json()
        assert (found["sm_clock_mhz"], found["power_w"], found["power_limited"]) == (1790, 703.2, True)
    with pytest.raises(ProcessLookupError):  # nothing is left that looks
        os.kill(int((tmp_path / "process").read_text()), 0)


def test_the_bench_goes_on_where_nobody_can_watch(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "nvidia_smi", lambda uuid: ["no-such-program"])
    monkeypatch.setattr(Kernels, "launch", lambda self, rows, steps: iter([[7 for _ in rows]] * steps))
    for result in bench():
        found = result.as_json()
        assert found["tokens_per_s"] > 0
        assert (found["sm_clock_mhz"], found["power_w"], found["power_limited"]) == (None, None, None)
