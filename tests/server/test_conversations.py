"""What real clients sent in a whole task, sent again: the bodies in tests/server/conversations.

They were recorded by `python -m tools.clients --record`. The model is the same script, so each body holds,
as the client gives it back, what the server answers to the body before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.engine.prefix import LEAST_SPARED
from headrace.engine.request import Request
from headrace.model.kv import BLOCK_TOKENS
from tests.server import patient
from tools.clients.catalogue import CLIENTS
from tools.clients.record import CONVERSATIONS, read
from tools.clients.script import answer
from tools.clients.server import Served, served

FILES = sorted(CONVERSATIONS.glob("*.json"))
# aider gives the file anew in each turn, in the middle of its prompt. What is before it is found from the
# third request on.
FAITHFUL = [path for path in FILES if path.stem != "aider"]
_CUT = re.compile(r"\((\d+) characters\)")


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as running:
        yield running


def replay(server: Served, path: Path) -> list[Request]:
    """Send a conversation; the requests that the engine got, one for each body."""
    with patient.client(server.url) as client:
        for sent in read(path):
            response = client.post(sent["path"], json=sent["body"])
            assert response.status_code == 200, response.text
            assert '"error": {' not in response.text
    return list(server.requests)


def said(server: Served, request: Request) -> str:
    return server.tokenizer.decode(request.output, skip_special_tokens=False)


def carried_on(requests: list[Request]) -> list[bool]:
    """Of each request but the first: whether it begins with the one before and the answer to it."""
    return [
        later.prompt[: len(earlier.prompt) + len(earlier.output)] == [*earlier.prompt, *earlier.output]
        for earlier, later in pairwise(requests)
    ]


def test_every_client_has_a_conversation() -> None:
    assert {path.stem for path in FILES} == {client.name for client in CLIENTS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_script_runs_to_its_end(server: Served, path: Path) -> None:
    requests = replay(server, path)
    assert len(requests) == len(read(path))
    for request in requests:
        prompt = server.tokenizer.decode(request.prompt, skip_special_tokens=False)
        assert said(server, request) == answer(prompt) + "<|END_OF_TURN_TOKEN|>"
    last = said(server, requests[-1])
    assert "now 5" in last if path.stem != "aider" else "return a + b" in last


@pytest.mark.parametrize("path", FAITHFUL, ids=lambda path: path.stem)
def test_the_next_turn_goes_on_where_the_last_one_ended(server: Served, path: Path) -> None:
    requests = [request for request in replay(server, path) if "<|END_THINKING|>" in said(server, request)]
    carried = carried_on(requests)
    # Claude Code gives a call of its Edit back with an argument that the model did not write.
    expected = [True, path.stem != "claude-code", True]
    assert carried == expected
    for (earlier, later), whole in zip(pairwise(requests), carried, strict=True):
        known = len(earlier.prompt) + (len(earlier.output) if whole else 0)
        assert later.cached_tokens >= known - 2 * BLOCK_TOKENS
        assert later.cached_tokens <= known


def test_aider_finds_what_is_before_the_file(server: Served) -> None:
    """The third request has, between the history and the newest message, the file as it is by then.

    Its texts are as long again as they were sent: abridged they are too short for the cache to take note.
    """
    [path] = set(FILES) - set(FAITHFUL)
    bodies = [json.loads(_CUT.sub(lengthened, json.dumps(sent["body"]))) for sent in read(path)]
    mended = json.loads(json.dumps(bodies[-1]).replace("return a * b", "return a + b"))
    with patient.client(server.url) as client:
        for body in [*bodies, mended]:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    first, second, third = server.requests
    known = common(first.prompt, second.prompt)
    assert known > LEAST_SPARED
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert known - BLOCK_TOKENS < third.cached_tokens <= known


def lengthened(cut: re.Match[str]) -> str:
    """As much text as was cut out."""
    return ("and so on " * int(cut[1]))[: int(cut[1])]


def common(left: list[int], right: list[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
