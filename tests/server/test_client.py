"""headrace's own small client, against the server."""

from __future__ import annotations

import socket
import threading

import pytest

from headrace.client import Client, Piece, ServerError
from tests.server.scripted import REPLY, TURN_TOKENS, Scripted


def test_health_model_and_chat(server: Scripted) -> None:
    for url in (server.url, server.url + "/", server.url + "/v1"):
        client = Client(url)
        assert client.is_healthy()
        assert client.model() == "scripted"
    pieces = list(client.chat([{"role": "user", "content": "hi"}]))
    assert "".join(piece.text for piece in pieces) == REPLY
    assert pieces[-1] == Piece("", "stop", len(REPLY) + TURN_TOKENS)


def test_leaving_an_answer_cancels_it(server: Scripted) -> None:
    pieces = Client(server.url).chat([{"role": "user", "content": "endless"}], reasoning_effort="none")
    next(pieces)
    server.wait_busy(running=1)
    pieces.close()
    server.wait_idle()


def test_the_servers_words_are_passed_on(server: Scripted) -> None:
    with pytest.raises(ServerError, match="'gpt-4o' does not exist here"):
        list(Client(server.url).chat([{"role": "user", "content": "hi"}], model="gpt-4o"))


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert not client.is_healthy()
        with pytest.raises(ServerError, match="cannot reach a server at"):
            client.model()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('data: {"choices": []}\n\n', "broke off"),
        ('data: {"error": {"message": "it failed"}}\n\ndata: [DONE]\n\n', "it failed"),
        ("data: hello\n\n", "does not answer as"),
    ],
)
def test_streams_that_go_wrong(body: str, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, body))
        thread.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerError, match=message):
            list(client.chat([{"role": "user", "content": "hi"}]))
        thread.join()


def _answer_once(listener: socket.socket, body: str, cut: int = 0) -> None:
    """Answer a request with a body, `cut` characters of which are promised but not sent."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(10000)
        sent = body[: len(body) - cut]
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{sent}".encode())


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://localhost:port", "http://[::1", ""])
def test_other_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="give one like http://"):
        Client(url)


@pytest.mark.parametrize(("body", "cut"), [('["status"]', 0), ('"status"', 0), ('{"status": "ok"}', 3)])
def test_what_answers_otherwise_is_not_healthy(body: str, cut: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, body, cut))
        thread.start()
        assert not Client(f"http://127.0.0.1:{listener.getsockname()[1]}").is_healthy()
        thread.join()


def test_an_answer_that_breaks_off_is_a_server_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, '{"data": [{"id": "x"}]}', 3))
        thread.start()
        with pytest.raises(ServerError, match="lost the connection to"):
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}").model()
        thread.join()


def test_a_stream_as_others_write_it() -> None:
    """No space after the colon, no reason before there is one, no usage: all of it is allowed."""
    events = [
        '{"choices": [{"delta": {"content": "Hello"}}]}',
        '{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        "[DONE]",
    ]
    body = "".join(f"data:{event}\n\n" for event in events)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, body))
        thread.start()
        pieces = Client(f"http://127.0.0.1:{listener.getsockname()[1]}").chat([])
        assert list(pieces) == [Piece("Hello"), Piece("", "stop", None)]
        thread.join()
