"""The tensors of a folder of safetensors files.

All headers are read and checked before any tensor is, so that a checkpoint that cannot be loaded is refused
before memory is spent on it. The format: 8 bytes with the length of a JSON header, the header, which gives
for each tensor type, shape and byte range, and then the bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from headrace.model.errors import CheckpointError

# Bytes of an element, for the types that weights are read from.
ELEMENT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
AGAIN = "the file is damaged or incomplete: fetch it again"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: its file, its place among the file's bytes, and its shape."""

    name: str
    file: Path
    offset: int
    size: int
    shape: tuple[int, ...]


class SafetensorsFolder:
    """All tensors of the safetensors files in `folder`. Raises CheckpointError, naming file and tensor."""

    def __init__(self, folder: Path) -> None:
        self.entries: dict[str, Entry] = {}
        for file in shard_files(folder):
            for entry in read_header(file):
                if entry.name in self.entries:
                    other = self.entries[entry.name].file
                    raise CheckpointError(f"{entry.name} is both in {other} and {file}: remove one of them")
                self.entries[entry.name] = entry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def location(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self.entries[name].file)

    def size(self, name: str) -> int:
        """Bytes that a tensor takes on disk."""
        return self.entries[name].size

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, file by file in the order of their bytes. One file at a time is mapped."""
        for file in dict.fromkeys(entry.file for entry in self.entries.values()):
            inside = [entry for entry in self.entries.values() if entry.file == file]
            with safe_open(file, framework="pt") as opened:
                for entry in sorted(inside, key=lambda entry: entry.offset):
                    yield entry.name, opened.get_tensor(entry.name)


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or else all there are."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{folder} holds no .safetensors file: other formats (.bin, .pth) must be converted first"
            )
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of a checkpoint ({error}): fetch it again") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}: fetch them")
    return [folder / name for name in names]


def read_header(file: Path) -> list[Entry]:
    """The tensors that a file says it holds, checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file}: its header ends beyond its {size} bytes; {AGAIN}")
        try:
            header = json.loads(stream.read(length))
            described = {name: value for name, value in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: its header is no JSON object; {AGAIN}") from error
    return [_entry(file, name, fields, size - 8 - length) for name, fields in described.items()]


def _entry(file: Path, name: str, fields: Any, available: int) -> Entry:
    try:
        kind, shape = fields["dtype"], tuple(int(extent) for extent in fields["shape"])
        begin, end = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header's entry of {name} is not readable; {AGAIN}") from error
    if kind not in ELEMENT_SIZES:
        raise CheckpointError(
            f"{file}: {name} is stored as {kind}; only {', '.join(ELEMENT_SIZES)} can be read: "
            "use a checkpoint that is not quantised"
        )
    if begin < 0 or end - begin != math.prod(shape) * ELEMENT_SIZES[kind]:
        raise CheckpointError(f"{file}: the byte range of {name} does not fit its shape {shape}; {AGAIN}")
    if end > available:
        raise CheckpointError(
            f"{file}: {name} should end at byte {end} of the data, of which there are {available}; {AGAIN}"
        )
    return Entry(name, file, begin, end - begin, shape)
