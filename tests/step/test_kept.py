"""Packed weights that are kept on disk are the checkpoint's own, whatever happened to either."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.load import resolve
from headrace.model.checkpoint import read_config
from headrace.step import kept
from headrace.step.kept import DamagedError, pack_kept, place_of, read
from headrace.step.pack import PackedWeights, pack_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("north-micro"), tmp_path / "model"))


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "PIECE", 100_000)


def pack(checkpoint: Path, folder: Path) -> PackedWeights:
    return pack_kept(checkpoint, folder, device="cpu", dtype=torch.bfloat16)


def same(one: PackedWeights, other: PackedWeights) -> bool:
    return torch.equal(one.data.view(torch.int16), other.data.view(torch.int16)) and torch.equal(
        one.norms, other.norms
    )


def kept_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_warm_start_reads_no_tensor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    right = pack_checkpoint(checkpoint, device="cpu", dtype=torch.bfloat16)
    assert same(pack(checkpoint, folder), right)
    assert kept_file(folder) == place_of(checkpoint, folder, torch.bfloat16)
    monkeypatch.setattr(kept, "pack_checkpoint", None)
    assert same(pack(checkpoint, folder), right)


@pytest.mark.parametrize("damage", ["first byte", "norms", "end", "half", "empty", "checksums"])
def test_what_is_damaged_is_seen_and_made_again(
    checkpoint: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    right = pack(checkpoint, folder)
    file = kept_file(folder)
    content = bytearray(file.read_bytes())
    arrays = right.data.nbytes + right.norms.nbytes
    match damage:
        case "first byte":
            content[0] ^= 1
        case "norms":
            content[arrays - 3] ^= 64
        case "end":
            del content[-1:]
        case "half":
            del content[len(content) // 2 :]
        case "empty":
            content.clear()
        case "checksums":
            content[arrays] = 0xFF
    file.write_bytes(content)
    with pytest.raises(DamagedError):
        read(file, read_config(checkpoint), device="cpu", dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert same(pack(checkpoint, folder), right)
    assert "cannot be used" in caplog.text
    assert same(read(kept_file(folder), read_config(checkpoint), device="cpu", dtype=torch.bfloat16), right)


@pytest.mark.parametrize("change", ["touched", "config", "type", "code"])
def test_what_is_stale_is_not_found_and_goes(
    checkpoint: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dtype = tmp_path / "kept", torch.bfloat16
    pack(checkpoint, folder)
    old = kept_file(folder)
    match change:
        case "touched":
            os.utime(next(checkpoint.glob("*.safetensors")), ns=(1, 1))
        case "config":
            os.utime(checkpoint / "config.json", ns=(1, 1))
        case "type":
            dtype = torch.float32
        case "code":
            monkeypatch.setattr(kept, "_CODE", kept._CODE[1:])
    made = pack_kept(checkpoint, folder, device="cpu", dtype=dtype)
    assert same(made, pack_checkpoint(checkpoint, device="cpu", dtype=dtype))
    assert kept_file(folder) != old, "one file of a checkpoint is kept"


@pytest.mark.parametrize(("cores", "threads"), [(1, 8), (8, 8), (12, 12), (16, 16), (128, 16)])
def test_every_core_moves_pieces_and_a_disk_is_asked_for_several(cores: int, threads: int) -> None:
    assert kept.threads_for(cores) == threads


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_however_many_move_pieces_these_are_the_same(
    threads: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def noted(count: int) -> ThreadPoolExecutor:
        used.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(kept, "THREADS", threads)
    monkeypatch.setattr(kept, "ThreadPoolExecutor", noted)
    right = pack(checkpoint, tmp_path / "kept")
    place = kept_file(tmp_path / "kept")
    assert same(read(place, read_config(checkpoint), device="cpu", dtype=torch.bfloat16), right)
    assert used == [threads] * 2  # to write, and to read


def test_checkpoints_do_not_share(checkpoint: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    for path in (checkpoint, other):
        pack(path, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_full_or_forbidden_disk_costs_a_warning(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = pack_checkpoint(checkpoint, device="cpu", dtype=torch.bfloat16)
    (tmp_path / "file").touch()
    assert same(pack(checkpoint, tmp_path / "file" / "kept"), right)
    assert "not kept" in caplog.text
    caplog.clear()
    monkeypatch.setattr(kept, "SPARE", 1e12)
    assert same(pack(checkpoint, tmp_path / "kept"), right)
    assert "GiB free" in caplog.text
    assert not list((tmp_path / "kept").iterdir())


def test_an_interrupted_write_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(kept, "_write_all", fail)
    pack(checkpoint, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.gpu
def test_a_gpu_gets_the_same(checkpoint: Path, tmp_path: Path) -> None:
    right = pack_checkpoint(checkpoint, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        made = pack_kept(checkpoint, tmp_path / "kept", device="cuda", dtype=torch.bfloat16)
        assert made.data.is_cuda
        assert same(made, right)
