"""`make test-clients`: install the clients, let each do the task, print the table, write the results.

    python -m tools.clients [NAME ...] [--list] [--serve PORT] [--record] [--output FILE]

Ends with 0 if every client that can be installed here passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import shutil
import sys
import threading
from importlib.metadata import version
from pathlib import Path

from headrace.bench.results import commit
from tools.bench import RESULTS
from tools.clients.catalogue import CLIENTS, KEY, Client
from tools.clients.install import FOLDER, NotInstallableError, install, installed_version
from tools.clients.record import CONVERSATIONS
from tools.clients.server import served
from tools.clients.task import ABSENT, FAILED, PASSED, Outcome, perform


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients to run: {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="print the clients and do nothing else")
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="serve the script until Ctrl-C, run nothing"
    )
    parser.add_argument("--record", action="store_true", help="make what the clients sent a test")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(names)):
        parser.error(f"there is no client {', '.join(unknown)}: choose from {', '.join(names)}")
    if arguments.list:
        print("\n".join(names))
        return 0
    if arguments.serve is not None:
        return wait(arguments.serve)
    outcomes = [attempt(client) for client in CLIENTS if client.name in (arguments.names or names)]
    print(table(outcomes))
    if arguments.record:
        keep(outcomes)
    if not arguments.names or arguments.output:
        write(outcomes, arguments.output or RESULTS / "clients.json")
    return int(any(outcome.result == FAILED for outcome in outcomes))


def wait(port: int) -> int:
    """Serve the script until Ctrl-C."""
    with served(port=port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"The script is served at {server.url}/v1. Ctrl-C stops it.", flush=True)
        threading.Event().wait()
    return 0


def attempt(client: Client) -> Outcome:
    """Install the client and let it do the task, with a server of its own."""
    print(f"{client.name} {client.package.version} ...", flush=True)
    try:
        installed = install(client.name, client.package)
    except NotInstallableError as error:
        return Outcome(client.name, client.package.version, ABSENT, str(error))
    with served(api_keys=(KEY,)) as server:
        return perform(client, installed, installed_version(client.name, client.package), server)


def keep(outcomes: list[Outcome]) -> None:
    """Put the conversations of the clients that passed where the tests read them."""
    for outcome in outcomes:
        if outcome.result == PASSED:
            source = FOLDER / "runs" / outcome.client / "conversation.json"
            shutil.copyfile(source, CONVERSATIONS / f"{outcome.client}.json")


def table(outcomes: list[Outcome]) -> str:
    head = ("client", "version", "result", "s", "turns", "prompt", "reusable", "cached", "why")
    rows = [
        (
            *(each.client, each.version, each.result, f"{each.seconds}", f"{each.turns}"),
            *(f"{each.prompt_tokens}", f"{each.reusable_tokens}", f"{each.cached_tokens}", each.reason),
        )
        for each in outcomes
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )


def matrix(outcomes: list[Outcome]) -> str:
    """The outcomes as docs/clients.md has them."""
    head = ("client", "version", "result", "turns", "prompt tokens", "known", "cached")
    rows = [
        (
            *(each.client, each.version, f"{each.result}: {each.reason}" if each.reason else each.result),
            *(f"{each.turns}", f"{each.prompt_tokens:,}"),
            *(f"{each.reusable_tokens:,}", f"{each.cached_tokens:,}"),
        )
        for each in outcomes
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def write(outcomes: list[Outcome], path: Path) -> None:
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} CPU",
        "commit": commit(),
        "command": "python -m tools.clients",
        "versions": {"python": platform.python_version(), "headrace": version("headrace")},
        "clients": [outcome.as_dict() for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{matrix(outcomes)}\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
