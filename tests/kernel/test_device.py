"""Kernels are loaded and launched as the driver wants it: by cuda.core, over a driver that only writes down.

Each function named `launch_...` runs in a process of its own, which finds this driver in place of CUDA's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernel.device import DecodeKernel, DeviceError, Module
from headrace.kernel.prompt.passes import Passes

DRIVER = Path(__file__).parent / "driver" / "driver.c"
SHARED_ALLOWED = "attribute 8 of decode: 230000"  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, in cuda.h


Written = Callable[[Callable[[], None]], list[str]]
STREAM: Any = SimpleNamespace(cuda_stream=77)


def launch_decode() -> None:
    DecodeKernel(b"cubin").launch(132, np.array([1, 2, -1]), STREAM)


def launch_what_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"kernel nothing .* the driver's name of it"):
        Module(b"cubin").kernel("nothing")
    with pytest.raises(DeviceError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        DecodeKernel(b"cubin").launch(133, np.array([1, 2, -1]), STREAM)
    module = Module(b"cubin")
    with pytest.raises(DeviceError, match="the driver's name of it"):
        module.launch(module.kernel("unpack"), STREAM, 1, grid=(1, 1), threads=1, shared=2**20)


def launch_passes() -> None:
    passes, values = Passes(), torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    matrices = torch.zeros(3, 8, 32, dtype=torch.bfloat16)
    passes.unpack(matrices.flatten(), matrices, paired=True)
    with pytest.raises(ValueError, match="cannot be unpacked"):  # no whole tile
        passes.unpack(values.flatten(), values, paired=True)
    passes.join([values, values], [values[0], values[1]], [False, True], values)
    sys.stdout.write(f"{matrices.data_ptr()} {values.data_ptr()} {values[1].data_ptr()}\n")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        "libcuda.so.1",
        str(DRIVER),
        "-ldl",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.fixture
def written(driver: Path) -> Written:
    """Runs a function over the driver: the lines that come of it."""

    def run(function: Callable[[], None]) -> list[str]:
        result = subprocess.run(
            [sys.executable, "-W", "error", "-m", __name__, function.__name__],
            env=os.environ | {"LD_LIBRARY_PATH": str(driver), "HEADRACE_CACHE": str(driver / "kernels")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


def hexadecimal(*words: int, size: int = 8) -> str:
    return b"".join(word.to_bytes(size, "little", signed=True) for word in words).hex()


def test_decode_is_launched_cooperatively_with_its_struct(
    written: Written,
) -> None:
    attribute, launch = written(launch_decode)
    assert attribute == SHARED_ALLOWED
    assert launch == f"cooperative decode 132,1,1 384,1,1 230000 77 {hexadecimal(1, 2, -1)}"


def test_steps_of_prompts_get_addresses_numbers_and_structs(
    written: Written,
) -> None:
    unpack, join, addresses = written(launch_passes)
    matrices, whole, second = (int(address) for address in addresses.split())
    pointer = hexadecimal(matrices)
    sizes = " ".join(hexadecimal(number, size=4) for number in (12, 32, 8, 1))
    assert unpack == f"ex unpack 1,1,1 256,1,1 0 77 {pointer} {pointer} {sizes}"
    pointer = hexadecimal(whole)
    none = [0] * 14
    parts = hexadecimal(whole, whole, *none, whole, second, *none, 3, -3, *none)
    sizes = " ".join(hexadecimal(number, size=4) for number in (2, 1, 2))
    assert join == f"plain join 3,1,1 256,1,1 0 77 {parts} {pointer} {sizes}"


def test_what_the_driver_refuses_is_an_error_in_its_words(
    written: Written,
) -> None:
    assert written(launch_what_is_refused) == [SHARED_ALLOWED]


if __name__ == "__main__":
    torch.cuda.current_stream = lambda: STREAM  # type: ignore[assignment, misc]
    globals()[sys.argv[1]]()
