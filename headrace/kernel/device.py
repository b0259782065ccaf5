"""Loads cubins and launches their kernels, through `cuda.core`, with errors as exceptions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from headrace.step.machine import CONSUMER_GROUPS, GROUP_THREADS

THREADS = (CONSUMER_GROUPS + 1) * GROUP_THREADS  # of a block: see state.h


class DeviceError(RuntimeError):
    """A call of the CUDA driver failed, or the device cannot run the kernel."""


class Module:
    """The kernels of a cubin, on the current device."""

    def __init__(self, cubin: bytes) -> None:
        self._core, self._driver = _cuda()
        torch.cuda.current_stream()  # makes the device's primary context the current one
        self._code = self._core.ObjectCode.from_cubin(cubin)
        # Kept, since making one costs more than a launch; PyTorch's streams last as long as the process.
        self._stream = functools.cache(self._core.Stream.from_handle)

    def kernel(self, name: str) -> Any:
        """The kernel of that name. Raises DeviceError if there is none, or the cubin cannot be loaded."""
        try:
            return self._code.get_kernel(name)
        except Exception as error:  # cuda.core's class of errors has no public name
            raise DeviceError(f"the kernel {name} cannot be loaded: {error}") from error

    def launch(
        self,
        kernel: Any,
        stream: torch.cuda.Stream,
        *arguments: int | np.ndarray[Any, Any],
        grid: tuple[int, int],
        threads: int,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Start a kernel with addresses and integers, and arrays for structs by value.

        The driver takes the low bytes of an integer, as many as the kernel's parameter has.
        """
        try:
            config = self._core.LaunchConfig(
                grid=grid, block=threads, shmem_size=shared, is_cooperative=cooperative
            )
            if any(isinstance(argument, np.ndarray) for argument in arguments):
                self._launch_with_structs(kernel, stream, arguments, config)
            else:
                self._core.launch(self._stream(stream.cuda_stream), config, kernel, *arguments)
        except Exception as error:
            raise DeviceError(f"a kernel cannot be launched: {error}") from error

    def integer(self, name: str) -> int:
        """The value of a constant of the cubin. (cuda.core reads none.)"""
        address, size = self._call("cuLibraryGetGlobal", self._code.handle, name.encode())
        number = np.zeros(1, dtype=np.int32)
        self._call("cuMemcpyDtoH", number.ctypes.data, address, size)
        return int(number[0])

    def allow_shared(self, kernel: Any, size: int) -> None:
        """Let a kernel use more shared memory than 48 KB. (cuda.core sets no attributes of kernels.)"""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuKernelSetAttribute", attribute, size, kernel.handle, self._call("cuCtxGetDevice"))

    def _launch_with_structs(
        self, kernel: Any, stream: torch.cuda.Stream, arguments: tuple[Any, ...], config: Any
    ) -> None:
        """What `cuda.core.launch` does, which takes no structs: https://github.com/NVIDIA/cuda-python/issues/2343."""
        values = [np.asarray(argument) for argument in arguments]
        pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
        how = (
            self._driver.CUfunction(int(kernel.handle)),
            *config.grid,
            *config.block,
            config.shmem_size,
            self._driver.CUstream(stream.cuda_stream),
            pointers.ctypes.data,
        )
        if config.is_cooperative:
            self._call("cuLaunchCooperativeKernel", *how)
        else:
            self._call("cuLaunchKernel", *how, 0)

    def _call(self, name: str, *arguments: object) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name}: {error.name}")
        return results[0] if len(results) == 1 else tuple(results)


class DecodeKernel:
    """The kernel `decode` of a cubin, which takes one struct."""

    def __init__(self, cubin: bytes) -> None:
        self._module = Module(cubin)
        self._kernel = self._module.kernel("decode")
        self.shared_bytes = self._module.integer("shared_bytes")
        self._module.allow_shared(self._kernel, self.shared_bytes)

    def launch(self, blocks: int, argument: np.ndarray[Any, Any], stream: torch.cuda.Stream) -> None:
        """Start the kernel. Cooperatively: blocks that cannot all be resident are an error, not a hang."""
        self._module.launch(
            self._kernel,
            stream,
            argument,
            grid=(blocks, 1),
            threads=THREADS,
            shared=self.shared_bytes,
            cooperative=True,
        )


def _cuda() -> tuple[Any, Any]:
    try:
        from cuda import core
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError("the kernels need cuda.core: pip install 'headrace[gpu]'") from None
    return core, driver
