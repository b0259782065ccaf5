"""`make test-evals`: install the programs, run each against the endpoint, print and write what they report.

    python -m tools.evals [NAME ...] [--output FILE]

Ends with 0 if every program that can be installed here did what it should.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.bench.results import commit
from tools.bench import RESULTS
from tools.clients.install import FOLDER, NotInstallableError, install
from tools.clients.task import ABSENT, FAILED, PASSED
from tools.demo import DemoError
from tools.evals.programs import PROGRAMS, Program, ProgramError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [program.name for program in PROGRAMS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"programs to run: {', '.join(names)}")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(names)):
        parser.error(f"there is no program {', '.join(unknown)}: choose from {', '.join(names)}")
    outcomes = [attempt(each) for each in PROGRAMS if each.name in (arguments.names or names)]
    for outcome in outcomes:
        print(*(f"{value}" for value in outcome.values() if value), sep="  ")
    if not arguments.names or arguments.output:
        write(outcomes, arguments.output or RESULTS / "evals.json")
    return int(any(outcome["result"] == FAILED for outcome in outcomes))


def attempt(program: Program) -> dict[str, Any]:
    """Install the program and run it in an empty folder, build/clients/runs/NAME."""
    print(f"{program.name} {program.package.version} ...", flush=True)
    head = {"program": program.name, "version": program.package.version}
    folder = FOLDER / "runs" / program.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        installed = install(program.name, program.package)
        return {**head, "result": PASSED, "reported": program.run(installed, folder)}
    except NotInstallableError as error:
        return {**head, "result": ABSENT, "reason": str(error)}
    except (ProgramError, DemoError) as error:
        return {**head, "result": FAILED, "reason": str(error)}


def write(outcomes: list[dict[str, Any]], path: Path) -> None:
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} CPU",
        "commit": commit(),
        "command": "python -m tools.evals",
        "versions": {"python": platform.python_version(), "headrace": version("headrace")},
        "programs": outcomes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
