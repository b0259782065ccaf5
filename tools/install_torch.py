"""Install the right build of PyTorch: CUDA where there is an NVIDIA driver, CPU elsewhere.

A plain `pip install torch` on Linux brings several gigabytes of CUDA libraries. On a machine without a GPU
this script therefore looks first at what an install would bring, and takes a build only if it brings none of
them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_PACKAGES = ("nvidia-", "cuda-", "triton")


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", *arguments], text=True, capture_output=True, check=False
    )


def planned_packages(*arguments: str) -> list[str] | None:
    """The packages that an install would bring, or None if pip cannot find them."""
    result = pip("--quiet", "--dry-run", "--report", "-", *arguments)
    if result.returncode:
        return None
    return [item["metadata"]["name"].lower() for item in json.loads(result.stdout)["install"]]


def choose(requirement: list[str]) -> list[str]:
    """The pip arguments that bring a build for this machine."""
    if has_nvidia_driver():
        return requirement
    for source in ([], ["--index-url", CPU_INDEX]):
        packages = planned_packages(*requirement, *source)
        if packages is not None and not any(name.startswith(GPU_PACKAGES) for name in packages):
            return [*requirement, *source]
    sys.exit(
        "No CPU build of torch could be found: the package index offers only CUDA builds, and "
        f"{CPU_INDEX} did not answer. Install torch into .venv yourself, then run make again."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--constraint", required=True, help="pip constraints file that pins torch")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is not None:
        return
    result = pip("--quiet", *choose(["torch", "--constraint", arguments.constraint]))
    if result.returncode:
        sys.exit(f"torch could not be installed:\n{result.stderr}")


if __name__ == "__main__":
    main()
