"""The few calls of the CUDA driver that the kernel needs, with errors as exceptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

THREADS = 384  # of a block: see state.h


class DeviceError(RuntimeError):
    """A call of the CUDA driver failed, or the device cannot run the kernel."""


class Module:
    """A cubin on the current device, and its kernel `decode`, which takes one struct."""

    def __init__(self, cubin: bytes) -> None:
        self._driver = _driver()
        torch.cuda.current_stream()  # makes the device's primary context the current one
        self._module = self._call("cuModuleLoadData", cubin)
        self._function = self._call("cuModuleGetFunction", self._module, b"decode")
        address, size = self._call("cuModuleGetGlobal", self._module, b"shared_bytes")
        number = np.zeros(1, dtype=np.int32)
        self._call("cuMemcpyDtoH", number.ctypes.data, address, size)
        self.shared_bytes = int(number[0])
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, attribute, self.shared_bytes)

    def launch(self, blocks: int, argument: np.ndarray[Any, Any], stream: torch.cuda.Stream) -> None:
        """Start the kernel. Cooperatively: blocks that cannot all be resident are an error, not a hang."""
        pointers = np.array([argument.ctypes.data], dtype=np.uint64)
        self._call(
            "cuLaunchCooperativeKernel",
            self._function,
            *(blocks, 1, 1),
            *(THREADS, 1, 1),
            self.shared_bytes,
            self._driver.CUstream(stream.cuda_stream),
            pointers.ctypes.data,
        )

    def _call(self, name: str, *arguments: object) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name}: {error.name}")
        return results[0] if len(results) == 1 else tuple(results)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError("the decode kernel needs CUDA's bindings: pip install 'headrace[gpu]'") from None
    return driver
