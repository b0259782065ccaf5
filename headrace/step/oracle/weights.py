"""The weights as a plan addresses them: pages in one array, read tile by tile."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.step.isa import K_BLOCK, TILE_ROWS
from headrace.step.layout import UNIT_ELEMENTS
from headrace.step.oracle.arithmetic import Floats


class WeightPages:
    """Packed weights, and the norms float32 [norms, hidden].

    `packed` is one-dimensional, as the packer lays it out. Its elements may be wider than bfloat16, which
    gives the float32 mode something to be exact about; offsets count elements all the same.
    """

    def __init__(self, packed: Tensor, norms: Tensor) -> None:
        self.norms: Floats = norms.float().numpy()
        self._packed = packed
        self._plain = np.empty(packed.shape, dtype=np.float32)
        self._unpacked = np.zeros(packed.numel() // UNIT_ELEMENTS, dtype=np.bool_)

    def rows(self, offset: int, tiles: int, k: int) -> Floats:
        """`tiles` tiles of 8 rows from `offset` (in units), in plain order: [tiles * 8, k].

        A tile of 16 rows counts as two. Unpacked when first read.
        """
        units = slice(offset, offset + tiles * TILE_ROWS * k // UNIT_ELEMENTS)
        elements = slice(units.start * UNIT_ELEMENTS, units.stop * UNIT_ELEMENTS)
        if units.stop > len(self._unpacked):
            raise IndexError(f"weights up to unit {units.stop} are read, but there are {len(self._unpacked)}")
        if not self._unpacked[units].all():
            stored = self._packed[elements].view(tiles, k // K_BLOCK, TILE_ROWS, K_BLOCK)
            self._plain[elements] = stored.transpose(1, 2).to(torch.float32).numpy().reshape(-1)
            self._unpacked[units] = True
        return self._plain[elements].reshape(tiles * TILE_ROWS, k)
