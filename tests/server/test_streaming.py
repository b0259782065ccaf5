"""The form of events, and signs of life in silent streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from headrace.server.streaming import data_line, named_event
from tests.server import patient
from tests.server.scripted import Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_disconnect import post_and_keep
from tests.waiting import WAIT

BEGINS, ENDS = "#", "~"  # of the answer; no event has them for another reason
WORDS = f"say {{{BEGINS}abcdefgh{ENDS}}}"
STREAM = {"stream": True, "messages": user(WORDS), "max_tokens": 50}
COMMENT, PING = ": keep-alive\n\n", 'event: ping\ndata: {"type":"ping"}\n\n'
PROTOCOLS: list[tuple[str, dict[str, Any], str]] = [
    (PATH, STREAM, COMMENT),
    ("/v1/completions", {"prompt": WORDS, "stream": True}, COMMENT),
    ("/v1/responses", {"input": WORDS, "stream": True}, COMMENT),
    ("/v1/messages", STREAM, PING),
]
EVERY_PROTOCOL = pytest.mark.parametrize(("path", "body", "sign"), PROTOCOLS)
HELD_SECONDS = WAIT / 2  # after which a held-up engine goes on, so that a red test ends


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted_server(served={"keep_alive": 0.05}, max_sequences=1) as running:
        yield running
        running.wait_idle()


def read_until(pieces: Iterator[str], enough: Callable[[str], bool]) -> str:
    """What comes until it is enough, or all."""
    received = ""
    for piece in pieces:
        received += piece
        if enough(received):
            break
    return received


def read_until_signs(pieces: Iterator[str], sign: str) -> str:
    """What comes up to the second sign of life."""
    return read_until(pieces, lambda received: received.count(sign) >= 2)


@EVERY_PROTOCOL
def test_a_stream_that_waits_in_the_queue_shows_that_it_lives(
    server: Scripted, path: str, body: dict[str, Any], sign: str
) -> None:
    first = post_and_keep(server, stream=True)
    server.wait_busy(running=1)
    with patient.stream("POST", server.url + path, json=body) as response:
        assert read_until_signs(response.iter_text(), sign).count(sign) >= 2
    first.close()


@EVERY_PROTOCOL
def test_a_stream_whose_prompt_is_computed_shows_that_it_lives(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], sign: str
) -> None:
    entered, go_on = hold_up_prompts(server, monkeypatch, HELD_SECONDS)
    before = until_the_second_sign(server, path, body, sign, entered, go_on)
    assert BEGINS not in before


def hold_up_prompts(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> tuple[threading.Event, threading.Event]:
    """Computing a prompt sets the first event, and takes until the second is set or the time is over."""
    entered, go_on = threading.Event(), threading.Event()

    def prefill(chunks: Sequence[object]) -> None:
        entered.set()
        go_on.wait(seconds)

    monkeypatch.setattr(server.backend, "prefill", prefill)
    return entered, go_on


def test_the_gate_is_red_without_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(served={"keep_alive": 0.0}) as server:
        events = hold_up_prompts(server, monkeypatch, 0.5)
        with pytest.raises(AssertionError, match="never a second sign"):
            until_the_second_sign(server, *PROTOCOLS[0], *events)


@EVERY_PROTOCOL
def test_a_stream_that_falls_silent_while_it_decodes_shows_that_it_lives(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], sign: str
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    run = server.backend.run

    def held_up(*args: Any) -> Iterator[Any]:
        for made in run(*args):
            if server.backend.steps == 6:
                entered.set()
                go_on.wait(HELD_SECONDS)
            yield made

    monkeypatch.setattr(server.backend, "run", held_up)
    before = until_the_second_sign(server, path, body, sign, entered, go_on, said=BEGINS)
    assert BEGINS in before


def until_the_second_sign(
    server: Scripted,
    path: str,
    body: dict[str, Any],
    sign: str,
    entered: threading.Event,
    go_on: threading.Event,
    *,
    said: str = "",
) -> str:
    """What comes until the engine is held up, with what it has `said` by then, and while it is: two signs of
    life. The rest must come when it goes on."""
    with patient.stream("POST", server.url + path, json=body) as response:
        pieces = response.iter_text()
        try:
            before = read_until(pieces, lambda received: entered.is_set() and said in received)
            silence = read_until_signs(pieces, sign)
            assert entered.is_set()
            assert silence.count(sign) >= 2, "never a second sign"
            assert ENDS not in before + silence
        finally:
            go_on.set()
        assert ENDS in "".join(pieces)
    return before + silence


def test_every_event_is_one_line_to_every_client() -> None:
    """Also to those that take for a line's end whatever Unicode says may be one."""
    said = {"type": "x", "delta": "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029é\U0001f600"}
    data, blank = data_line(said).splitlines()
    assert blank == ""
    assert json.loads(data.removeprefix("data: ")) == said
    assert "é\U0001f600" in data
    name, data, blank = named_event(said).splitlines()
    assert (name, blank) == ("event: x", "")


def test_streams_that_are_not_silent_have_none_and_zero_is_never() -> None:
    with scripted_server(served={"keep_alive": 0.0}) as server:
        assert "keep-alive" not in patient.post(server.url + PATH, json=STREAM).text
    with scripted_server(served={"keep_alive": WAIT}) as server:
        assert "keep-alive" not in patient.post(server.url + PATH, json=STREAM).text
