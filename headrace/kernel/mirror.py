"""Arrays that the host fills and the device reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Mirror:
    """An array of records in pinned memory, `host`, and on the device, `device` (bytes).

    Without a GPU, as in tests, both are ordinary memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: torch.device) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._pinned = pinned_bytes(size, device)
        self.host: np.ndarray[Any, Any] = self._pinned.numpy().view(dtype).reshape(shape)
        self.device = device_bytes(size, device)

    def send(self) -> None:
        """Copy everything to the device, on the current stream."""
        self.device.copy_(self._pinned, non_blocking=True)

    def send_part(self, index: int) -> None:
        """Copy one entry of the first axis."""
        size = len(self._pinned) // len(self.host)
        part = slice(index * size, (index + 1) * size)
        self.device[part].copy_(self._pinned[part], non_blocking=True)


def device_bytes(size: int, device: torch.device) -> Tensor:
    """Memory of the device that any stream may use at once, not zeroed: uint8 [size].

    PyTorch hands out what work under way on the current stream may still use, so this waits for it.
    """
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return memory


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """Zeros that the device can read and write while the host does: uint8 [size]."""
    plain = torch.zeros(size, dtype=torch.uint8)
    return plain.pin_memory() if device.type == "cuda" else plain
