"""Results files of ours and of vLLM's, and what is no results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.compare import ResultsError, Speed, keys_of, merged, read_results

OURS: dict[str, Any] = {
    "date": "2026-11-30",
    "machine": "NVIDIA H200",
    "commit": "0123456789",
    "command": "headrace bench decode",
    "versions": {},
    "points": [
        {"rows": 1, "context": 8192, "ms_per_step": 2.0, "tokens_per_s": 500.0, "share_of_limit": 0.8},
        {"rows": 2, "context": [64, 128], "ms_per_step": 4.0, "tokens_per_s": 500.0, "share_of_limit": 0.7},
    ],
}
RUN: dict[str, Any] = {
    "setup": {"vllm": "0.24.0"},
    "decode": {
        "1x8192": {"batch": 1, "context": 8192, "ms_per_step": 5.0, "tok_s": 200.0},
        "4x8192": {"ms_per_step": 8.0, "tok_s": 500.0},
        "8x8192": {"skipped": "time"},
    },
}
PHASES = {"gpu": "NVIDIA H200, 580.1", "phases": {"uniform": {**RUN, "decode": {}}, "own": RUN}}


def saved(folder: Path, content: object, name: str = "results.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def test_ours(tmp_path: Path) -> None:
    results = read_results(saved(tmp_path, OURS))
    assert (results.title, results.machine) == ("headrace 0123456", "NVIDIA H200")
    assert results.speeds == {(1, 8192): Speed(2.0, 500.0, 0.8), (2, (64, 128)): Speed(4.0, 500.0, 0.7)}


@pytest.mark.parametrize(
    "power",
    [
        {"sm_clock_mhz": 1790, "power_w": 703.2, "power_limited": True},
        {"sm_clock_mhz": None, "power_w": None, "power_limited": None},
    ],
)
def test_ours_with_the_gpus_power_beside_files_from_before(tmp_path: Path, power: dict[str, Any]) -> None:
    points = [point | power for point in OURS["points"]]
    before = read_results(saved(tmp_path, OURS))
    assert read_results(saved(tmp_path, OURS | {"points": points})).speeds == before.speeds
    joined = merged(points, read_results(saved(tmp_path, RUN)))
    assert [point["vllm_tokens_per_s"] for point in joined] == [200.0, None]
    assert all(point.items() >= power.items() for point in joined)


def test_vllms_of_one_engine_and_of_a_phase(tmp_path: Path) -> None:
    right = {(1, 8192): Speed(5.0, 200.0), (4, 8192): Speed(8.0, 500.0)}  # the skipped one is passed over
    assert read_results(saved(tmp_path, RUN)).speeds == right
    own = read_results(saved(tmp_path, PHASES))
    assert (own.speeds, own.title, own.machine) == (right, "vLLM 0.24.0", "NVIDIA H200")
    assert read_results(saved(tmp_path, PHASES), phase="uniform").speeds == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"phases": {"load": RUN}}, "no phase 'own', but load"),
        ({"points": [{"rows": 1}]}, "not a results file as expected"),
        ({"setup": {}, "decode": {"eight": {"ms_per_step": 1}}}, "not a results file as expected"),
        ({"host": []}, "neither"),
        ([1], "neither"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ResultsError, match=words):
        read_results(saved(tmp_path, content))


@pytest.mark.parametrize("content", [b"no", b"\x89PNG"])
def test_a_file_that_is_not_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    with pytest.raises(ResultsError, match="not JSON"):
        read_results(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"there is no file .*nothing\.json"):
        read_results(tmp_path / "nothing.json")
    with pytest.raises(ResultsError, match="cannot be read"):
        read_results(tmp_path)


def test_vllms_speed_joins_the_points_that_it_was_measured_at(tmp_path: Path) -> None:
    joined = merged(OURS["points"], read_results(saved(tmp_path, RUN)))
    assert [point["vllm_tokens_per_s"] for point in joined] == [200.0, None]
    assert joined[1]["context"] == [64, 128]


def test_all_points_of_all_files_in_order(tmp_path: Path) -> None:
    both = [read_results(saved(tmp_path, OURS)), read_results(saved(tmp_path, RUN, "vllm.json"))]
    assert keys_of(both) == [(1, 8192), (2, (64, 128)), (4, 8192)]
