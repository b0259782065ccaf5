"""From what a client sent to a test: the bodies of its task, abridged, in tests/server/conversations.

Shapes stay whole, and so do names, schemas and everything that the script said. Long texts, which are the
client's own, shrink to their length, descriptions go, and what differs from run to run (folders, ids) is made
the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.clients.server import Exchange

CONVERSATIONS = Path(__file__).resolve().parent.parent.parent / "tests" / "server" / "conversations"
LONGEST = 100
# Words that steer the script, or the server: a text that has them keeps them.
_KEPT = re.compile(
    r"The function in \S+ subtracts.*?what it prints\.|SEARCH/REPLACE|COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT|"
    r"x-anthropic-billing-header:[^\n]*\n?|add\(2, 3\) = -?\d+|return a [-*+] b"
)
_ID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{64}\b")


def abridged(value: Any) -> Any:
    """A body with its long texts shortened."""
    if isinstance(value, dict):
        return {key: abridged(part) for key, part in value.items() if not _is_description(key, part)}
    if isinstance(value, list):
        return [abridged(part) for part in value]
    if isinstance(value, str) and len(value) > LONGEST:
        return _short(value)
    return value


def conversation(exchanges: Iterable[Exchange], work: Path) -> list[dict[str, Any]]:
    """The requests of a task that the model answered, in their order; the folder is called /project."""
    requests = []
    for each in exchanges:
        if each.method == "POST" and each.status == 200:
            text = json.dumps({"path": each.path, "body": each.json()}).replace(str(work), "/project")
            requests.append(abridged(json.loads(_ID.sub("0000", text))))
    return requests


def write(path: Path, requests: list[dict[str, Any]]) -> None:
    """Write a conversation; of each body only what differs from the one before it."""
    before: dict[str, Any] = {}
    lines = []
    for request in requests:
        body = request["body"]
        same = [key for key in body if key in before and body[key] == before[key]]
        changed = {key: value for key, value in body.items() if key not in same}
        lines.append({"path": request["path"], "same": same, "body": changed})
        before = body
    path.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """What `write` wrote, with whole bodies."""
    before: dict[str, Any] = {}
    requests = []
    for line in json.loads(path.read_text()):
        before = {**{key: before[key] for key in line["same"]}, **line["body"]}
        requests.append({"path": line["path"], "body": before})
    return requests


def _is_description(key: str, part: Any) -> bool:
    """Whether a field explains a tool or a schema; an argument of that name is an object there."""
    return key == "description" and isinstance(part, str)


def _short(text: str) -> str:
    kept = [found[0] for found in _KEPT.finditer(text)]
    if text.lstrip().startswith(("x-anthropic-billing-header:", "{", "[")) and len(text) < 10 * LONGEST:
        return text
    if len("".join(kept)) > len(text) // 2:
        return text  # mostly the task, or what the tools said
    return "\n".join([f"({len(text)} characters)", *dict.fromkeys(kept)])
