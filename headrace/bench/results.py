"""What a results file says of where its figures come from, and how it is written.

Every file has the date, the machine, the commit, the command and versions beside its figures, so that these
can be measured again.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


def origin(command: str | None = None) -> dict[str, Any]:
    """{"date", "machine", "commit", "command", "versions"} of this process."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "command": command or command_line(),
        "versions": versions(),
    }


def command_line() -> str:
    """What was typed, as near as this process can tell."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of a module that was run with -m
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    name = f"python -m {module}" if module else Path(sys.argv[0]).name
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])


def machine() -> str:
    """The GPU's name, or what CPU this is."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    """Of the source that runs; $HEADRACE_COMMIT where that is no checkout; "unknown" if neither says.

    A checkout that differs from its commit is marked "+".
    """
    if (told := os.environ.get("HEADRACE_COMMIT")) is not None:
        return told
    head = _git("rev-parse", "--verify", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    """What git says in the folder of this source; None if it says nothing of use."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def versions() -> dict[str, str]:
    """Of Python, of the packages that bear on speed, and of the driver."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if (driver := _driver()) is not None:
        found["driver"] = driver
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.split("\n")[0].strip()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """As JSON that people can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)
