"""Signs of life in silent streams."""

from __future__ import annotations

import httpx
import pytest

from tests.server.scripted import scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_disconnect import post_and_keep

STREAM = {"stream": True, "messages": user("hi"), "max_tokens": 50}


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        (PATH, STREAM, ": keep-alive\n\n"),
        ("/v1/completions", {"prompt": "hi", "stream": True}, ": keep-alive\n\n"),
        ("/v1/responses", {"input": "hi", "stream": True}, ": keep-alive\n\n"),
        ("/v1/messages", STREAM, 'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_a_stream_that_waits_in_the_queue_shows_that_it_lives(path: str, body: object, sign: str) -> None:
    with scripted_server(served={"keep_alive": 0.05}, max_sequences=1) as server:
        first = post_and_keep(server, stream=True)
        server.wait_busy(running=1)
        with httpx.stream("POST", server.url + path, json=body, timeout=10) as response:
            received = ""
            for piece in response.iter_text():
                received += piece
                if received.count(sign) >= 2:
                    break
        assert received.count(sign) >= 2
        first.close()
        server.wait_idle()


def test_streams_that_are_not_silent_have_none_and_zero_is_never() -> None:
    with scripted_server(served={"keep_alive": 0.0}) as server:
        assert "keep-alive" not in httpx.post(server.url + PATH, json=STREAM).text
    with scripted_server(served={"keep_alive": 5.0}) as server:
        assert "keep-alive" not in httpx.post(server.url + PATH, json=STREAM).text
