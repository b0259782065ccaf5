"""Packed weights kept on disk, so that the next start reads them as they lie in memory.

A file holds the array of pages, the norms, and at its end a checksum of every piece. Its name covers the
checkpoint's files (names, sizes, times of change), the element type and the code that packs, so it cannot be
stale; it appears under that name by one rename.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.model.checkpoint import read_config
from headrace.model.config import ModelConfig
from headrace.model.progress import Progress, tracked
from headrace.model.shards import shard_files
from headrace.step.pack import PackedWeights, pack_checkpoint

PIECE = 32 * 2**20  # bytes that one thread moves at a time, through a pinned buffer

SPARE = 1.25  # times a file's size that must be free before it is written
MAGIC = b"HEADRACE"
_ROOT = Path(__file__).parent.parent
_CODE = (
    *(f"step/{name}.py" for name in ("isa", "kept", "layout", "pack", "sizes", "weights")),
    *(f"model/{name}.py" for name in ("checkpoint", "gguf", "hf_config", "names", "shards")),
)

logger = logging.getLogger(__name__)


def threads_for(cores: int) -> int:
    """How many threads move pieces: one for each core, as copying and checksums keep it busy; at least 8, so
    that a disk is asked for several pieces at a time; at most 16, whose buffers take half a GiB."""
    return min(max(cores, 8), 16)


THREADS = threads_for(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


class DamagedError(Exception):
    """A kept file that is not what was written."""


def default_folder() -> Path:
    """headrace/weights in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "weights"


@torch.no_grad()
def pack_kept(
    path: Path,
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> PackedWeights:
    """As `pack_checkpoint`, but read from `folder` if the pages are there, and left there if they are not.

    A folder that cannot be read or written costs a warning and no more. Raises as `pack_checkpoint` does.
    """
    place = place_of(path, folder, dtype)
    try:
        return read(place, read_config(path), device=device, dtype=dtype, progress=progress)
    except FileNotFoundError:
        pass
    except (DamagedError, OSError) as error:
        logger.warning("Packing weights again, as those kept in %s cannot be used: %s", place, error)
    packed = pack_checkpoint(path, device=device, dtype=dtype, progress=progress)
    try:
        write(place, packed, progress)
    except OSError as error:
        logger.warning("Packed weights are not kept for the next start: %s", error)
    return packed


def place_of(path: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The file of a checkpoint: its name says where that lies, and after the dash what it is made of."""
    where = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    digest = hashlib.sha256()
    for part in (str(dtype), *(file.read_text() for file in (_ROOT / name for name in _CODE))):
        digest.update(f"{len(part)}:{part}".encode())
    files = [path / "config.json", *shard_files(path)] if path.is_dir() else [path]
    for file in files:
        stat = file.stat()
        digest.update(json.dumps([file.name, stat.st_size, stat.st_mtime_ns]).encode())
    return folder / f"{where}-{digest.hexdigest()[:32]}.pages"


def read(
    place: Path,
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> PackedWeights:
    """The weights that are kept in `place`. Raises DamagedError or OSError."""
    with place.open("rb") as file:
        sums = _read_end(file.fileno(), os.fstat(file.fileno()).st_size)
        packed = PackedWeights(config, device=device, dtype=dtype)
        pieces = list(_pieces(packed))
        if len(sums) != len(pieces):
            raise DamagedError(f"it has {len(sums)} pieces instead of {len(pieces)}")
        mover = _Mover(file.fileno(), packed.data.device)
        with tracked(progress, "Loading packed weights", sum(piece.size for piece in pieces)) as advance:
            for piece, stored, found in zip(pieces, sums, mover.each(mover.load, pieces), strict=True):
                if found != stored:
                    raise DamagedError(f"the checksum of {piece.size} bytes at {piece.offset} is wrong")
                advance(piece.size)
    return packed


def write(place: Path, packed: PackedWeights, progress: Progress | None = None) -> None:
    """Keep weights in `place`, in place of older ones of the same checkpoint. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for old in place.parent.glob(f"{place.name.partition('-')[0]}-*"):
        old.unlink(missing_ok=True)
    pieces = list(_pieces(packed))
    size = sum(piece.size for piece in pieces)
    free = shutil.disk_usage(place.parent).free
    if free < SPARE * size:
        raise OSError(f"{place.parent} has {free / 2**30:.1f} GiB free, and they take {size / 2**30:.1f}")
    part = place.with_suffix(f".{os.getpid()}")
    try:
        with part.open("xb") as file, tracked(progress, "Keeping packed weights", size) as advance:
            sums, mover = [], _Mover(file.fileno(), packed.data.device)
            for piece, found in zip(pieces, mover.each(mover.save, pieces), strict=True):
                sums.append(found)
                advance(piece.size)
            end = json.dumps(sums).encode()
            _write_all(file.fileno(), memoryview(end + len(end).to_bytes(8, "little") + MAGIC), size)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes in memory, uint8 [size], and where they lie in the file."""

    memory: Tensor
    offset: int

    @property
    def size(self) -> int:
        return len(self.memory)


def _pieces(packed: PackedWeights) -> Iterator[_Piece]:
    offset = 0
    for array in (packed.data, packed.norms):
        for memory in torch.split(array.view(torch.uint8).flatten(), PIECE):
            yield _Piece(memory, offset)
            offset += len(memory)


class _Mover:
    """Threads that move pieces between a file and memory, and check what they moved."""

    def __init__(self, file: int, device: torch.device) -> None:
        self._file, self._device, self._own = file, device, threading.local()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the threads' streams do not wait for what filled the memory

    def each(self, move: Callable[[_Piece], int], pieces: list[_Piece]) -> Iterator[int]:
        """The checksum of every piece, in their order."""
        pool = ThreadPoolExecutor(THREADS)
        try:
            yield from pool.map(move, pieces)
        finally:
            pool.shutdown(cancel_futures=True)

    def load(self, piece: _Piece) -> int:
        buffer = self._buffer(piece)
        view = buffer.numpy().data
        _read_all(self._file, view, piece.offset)
        self._copy(piece.memory, buffer)
        return zlib.crc32(view)

    def save(self, piece: _Piece) -> int:
        buffer = self._buffer(piece)
        self._copy(buffer, piece.memory)
        view = buffer.numpy().data
        _write_all(self._file, view, piece.offset)
        return zlib.crc32(view)

    def _buffer(self, piece: _Piece) -> Tensor:
        """The calling thread's pinned buffer; a CPU needs none."""
        if self._device.type != "cuda":
            return piece.memory
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        buffer: Tensor = self._own.buffer
        return buffer[: piece.size]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._device.type == "cuda":
            with torch.cuda.stream(self._own.stream):
                target.copy_(source, non_blocking=True)
            self._own.stream.synchronize()


def _read_end(file: int, size: int) -> list[int]:
    """The checksums that end a file."""
    try:
        tail = os.pread(file, 16, max(size - 16, 0))
        length = int.from_bytes(tail[:8], "little")
        if tail[8:] != MAGIC or length > size - 16:
            raise DamagedError("its end is missing")
        sums: list[int] = json.loads(os.pread(file, length, size - 16 - length))
        return sums
    except ValueError as error:
        raise DamagedError(f"its end cannot be read: {error}") from error


def _read_all(file: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise DamagedError("it is too short")
        view, offset = view[count:], offset + count


def _write_all(file: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
