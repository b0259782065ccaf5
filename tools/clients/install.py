"""Each client in a folder of its own, build/clients/NAME-VERSION, from npm or from PyPI."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "clients"
NODE = "22.23.5"  # for clients that want a newer Node.js than this machine has
INSTALL_SECONDS = 600


class NotInstallableError(RuntimeError):
    """A package that cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of a registry, "npm" or "pip", at one version.

    `node` is the least Node.js that it needs, `also` what pip must install with it.
    """

    registry: str
    name: str
    version: str
    node: int = 0
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Installed:
    """Where a package's commands are, and what must stand in PATH to run them."""

    commands: Path
    path: tuple[Path, ...]


def install(client: str, package: Package) -> Installed:
    """Install what is not there yet. Raises NotInstallableError."""
    folder = FOLDER / f"{client}-{package.version}"
    done = folder / ".installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (_npm if package.registry == "npm" else _pip)(folder, package)
        done.touch()
    if package.registry == "pip":
        return Installed(folder / "bin", (folder / "bin",))
    commands = folder / "node_modules" / ".bin"
    return Installed(commands, (commands, *_node(package.node)))


def _npm(folder: Path, package: Package) -> None:
    (folder / "package.json").write_text("{}\n")
    _call(["npm", "install", "--no-audit", "--no-fund", f"{package.name}@{package.version}"], folder)


def _pip(folder: Path, package: Package) -> None:
    _call([sys.executable, "-m", "venv", str(folder)], folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _call([*pip, f"{package.name}=={package.version}", *package.also], folder)


def _node(wanted: int) -> tuple[Path, ...]:
    """Folders with a Node.js of at least this major version: the machine's own, or the npm package of one."""
    own = shutil.which("node")
    if own is not None:
        said = subprocess.run([own, "--version"], capture_output=True, text=True, check=False).stdout
        if (found := re.match(r"v(\d+)", said)) and int(found[1]) >= wanted:
            return (Path(own).parent,)
    architecture = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    system = {"Linux": "linux", "Darwin": "darwin"}.get(platform.system(), platform.system().lower())
    name = f"node-{system}-{architecture}"
    install("node", Package("npm", name, NODE))
    return (FOLDER / f"node-{NODE}" / "node_modules" / name / "bin",)


def _call(command: list[str], folder: Path) -> None:
    try:
        run = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise NotInstallableError(f"{command[0]} is not on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstallableError(f"{command[0]} took longer than {INSTALL_SECONDS} s") from error
    if run.returncode:
        lines = (run.stderr or run.stdout).strip().splitlines()
        raise NotInstallableError(lines[-1] if lines else f"{command[0]} ended with {run.returncode}")


def installed_version(client: str, package: Package) -> str:
    """The version that lies in the client's folder, as the package itself says."""
    folder = FOLDER / f"{client}-{package.version}"
    if package.registry == "npm":
        manifest = folder / "node_modules" / package.name / "package.json"
        return str(json.loads(manifest.read_text())["version"])
    command = [str(folder / "bin" / "python"), "-c", "import sys; from importlib.metadata import version; "]
    command[-1] += "print(version(sys.argv[1]))"
    return subprocess.run([*command, package.name], capture_output=True, text=True, check=True).stdout.strip()
