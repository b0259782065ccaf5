"""One client doing the task: its folders, its run, and the verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.engine.request import Request
from tools.clients import record
from tools.clients.catalogue import TASK, Client, filled
from tools.clients.install import FOLDER, Installed
from tools.clients.script import BROKEN, CHECK, MENDED, REPORT
from tools.clients.server import MODEL, Exchange, Served

RUN_SECONDS = 120
PASSED, FAILED, ABSENT = "passed", "failed", "not installable here"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one client. `reason` says why it did not pass.

    `reusable_tokens` of the prompts' tokens stood at the beginning of an earlier prompt or its answer, and
    `cached_tokens` were not computed again.
    """

    client: str
    version: str
    result: str
    reason: str = ""
    seconds: float = 0.0
    requests: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def perform(client: Client, installed: Installed, version: str, server: Served) -> Outcome:
    """Let the client do the task.

    It works in a temporary folder, since clients look for a repository around them. What it printed and what
    went over the wire lies in build/clients/runs/NAME afterwards.
    """
    logs = FOLDER / "runs" / client.name
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix=f"{client.name}-", ignore_cleanup_errors=True) as folder:
        return _perform(client, installed, version, server, Path(folder), logs)


def _perform(
    client: Client, installed: Installed, version: str, server: Served, folder: Path, logs: Path
) -> Outcome:
    home, work = _prepare(folder)
    values = {
        "url": server.url,
        "model": MODEL,
        "work": str(work),
        "home": str(home),
        "tools": str(Path(__file__).parent),
    }
    values["task"] = filled(TASK, values)
    for name, text in client.settings.items():
        path = work / name[2:] if name.startswith("./") else home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(text, values))
    start = time.monotonic()
    code, said = _run(
        [str(installed.commands / client.command[0]), *(filled(part, values) for part in client.command[1:])],
        work,
        _environment(
            home, installed, {key: filled(text, values) for key, text in client.environment.items()}
        ),
        logs / "said.txt",
    )
    seconds = time.monotonic() - start
    _write_exchanges(logs / "requests.jsonl", server.exchanges)
    record.write(logs / "conversation.json", record.conversation(server.exchanges, work))
    reason = verdict(client, code, said, (work / "adder.py").read_text(), server.exchanges)
    requests = list(server.requests)
    return Outcome(
        client=client.name,
        version=version,
        result=FAILED if reason else PASSED,
        reason=reason,
        seconds=round(seconds, 1),
        requests=len(server.exchanges),
        turns=len(requests),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        reusable_tokens=reusable_tokens(requests),
        cached_tokens=sum(request.cached_tokens for request in requests),
    )


def verdict(client: Client, code: int | None, said: str, file: str, exchanges: Sequence[Exchange]) -> str:
    """Why the run did not do what it should; empty if it did."""
    refused = [exchange for exchange in exchanges if exchange.status >= 400 and exchange.method == "POST"]
    turns = [
        exchange
        for exchange in exchanges
        if exchange.path.startswith(client.protocol) and exchange.status == 200
    ]
    if refused:
        body = refused[0].reply.decode("utf-8", "replace")
        return f"the server answered {refused[0].path} with {refused[0].status}: {body[:200]}"
    if code is None:
        return f"not done after {RUN_SECONDS} s"
    if code != 0:
        lines = said.strip().splitlines()
        return f"exit code {code}: {lines[-1][:200] if lines else 'no output'}"
    if file != MENDED:
        return "adder.py is not mended"
    if len(turns) < 2:
        return f"{len(turns)} requests to {client.protocol}, where a task takes several"
    if client.reports and REPORT.format(result=5) not in said:
        return "the model's last words were not printed"
    return ""


def reusable_tokens(requests: Sequence[Request]) -> int:
    """Tokens at the beginning of each prompt that an earlier prompt, or its answer, had there as well."""
    earlier: list[list[int]] = []
    total = 0
    for request in requests:
        total += max((_common(request.prompt, tokens) for tokens in earlier), default=0)
        earlier.append([*request.prompt, *request.output])
    return total


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _prepare(folder: Path) -> tuple[Path, Path]:
    """An empty home, and a folder to work in with the broken file."""
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    (work / "adder.py").write_text(BROKEN)
    (work / "check.py").write_text(CHECK)
    return home, work


def _environment(home: Path, installed: Installed, own: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the caller's environment but where the system's commands are."""
    path = [*map(str, installed.path), "/usr/local/bin", "/usr/bin", "/bin"]
    temporary = home / "tmp"
    temporary.mkdir()
    return {
        "PATH": os.pathsep.join(path),
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "npm_config_registry": "http://127.0.0.1:9",  # what is not installed by now must do without
        **own,
    }


def _run(
    command: Sequence[str], work: Path, environment: Mapping[str, str], log: Path
) -> tuple[int | None, str]:
    """Exit code (None: it had to be stopped) and everything printed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    return code, log.read_text("utf-8", "replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the client with whatever it left running; its process group is its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _write_exchanges(path: Path, exchanges: Sequence[Exchange]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for each in exchanges:
            line = {
                "request": f"{each.method} {each.path}",
                "headers": each.headers,
                "body": each.json(),
                "status": each.status,
                "reply": each.reply.decode("utf-8", "replace"),
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
