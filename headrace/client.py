"""A small HTTP client of the endpoint, on the standard library: for `headrace chat --url` and the demo."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class ServerError(RuntimeError):
    """The server cannot be reached, or answered with an error; the message says which.

    `status` is the answer's, None where there was none or it came in a stream.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer. The last one has no text but says why the answer ended and its tokens, as
    far as the server tells.

    `reasoning` is what the model thinks before it speaks, `call` a part of a tool call as one can read it.
    """

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    reasoning: str = ""
    call: str = ""


class Client:
    """Talks to the server at `url`, such as http://127.0.0.1:8000 (with or without /v1 at its end).

    `timeout` is the longest silence to bear, in seconds; `api_key` is for a server that asks for one. Raises
    ValueError for a URL that is not HTTP.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, api_key: str | None = None) -> None:
        wrong = ValueError(f"{url!r} is not the address of a server: give one like http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError as error:  # of a port that is no number, say
            raise wrong from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self.url = url
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def is_healthy(self) -> bool:
        """Whether the server answers that it is well; False also while nothing listens there."""
        try:
            return bool(self._get("/health")["status"] == "ok")
        except (ServerError, LookupError, TypeError):
            return False

    def model(self) -> str:
        """The name of the first model that is served."""
        try:
            return str(self._model()["id"])
        except (LookupError, TypeError) as error:
            raise self._foreign() from error

    def default_sampling(self) -> dict[str, Any]:
        """The sampling of a request that says nothing, as far as the server tells."""
        try:
            return dict(self._model().get("default_sampling") or {})
        except (LookupError, TypeError, ValueError, AttributeError):
            return {}

    def _model(self) -> Any:
        return self._get("/v1/models")["data"][0]

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Generator[Piece, None, None]:
        """The pieces of the answer to a conversation as they arrive; `fields` go into the request.

        Leaving the iteration closes the connection, which cancels the answer on the server.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        connection = self._connect()
        try:
            response = self._send(
                connection, "POST", "/v1/chat/completions", {"messages": messages, **options, **fields}
            )
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise self._foreign() from error
        finally:
            connection.close()

    def _lost(self, error: Exception) -> ServerError:
        return ServerError(f"lost the connection to {self.url}: {error}")

    def _foreign(self) -> ServerError:
        return ServerError(f"{self.url} does not answer as an OpenAI-compatible server does")

    def _get(self, path: str) -> Any:
        connection = self._connect()
        try:
            return json.loads(self._send(connection, "GET", path).read())
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        except ValueError as error:
            raise self._foreign() from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        host = self._parts.hostname
        assert host is not None
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, self._port, timeout=self._timeout)
        return http.client.HTTPConnection(host, self._port, timeout=self._timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        """The response to a request, once its status is known to be a success."""
        try:
            data = None if body is None else json.dumps(body)
            headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
            connection.request(method, self._prefix + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                message = _message(response.read()) or f"{self.url} answered {response.status}"
                raise ServerError(message, status=response.status)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"cannot reach a server at {self.url}: {error}. Does headrace serve run there?"
            ) from error
        return response


def _pieces(response: http.client.HTTPResponse) -> Iterator[Piece]:
    reason: str | None = None
    tokens: int | None = None
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            yield Piece("", reason, tokens)
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(event["error"]["message"])
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            piece = _piece(choice["delta"])
            if piece != Piece():
                yield piece
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    raise ServerError("the server broke off its answer")


def _piece(delta: Mapping[str, Any]) -> Piece:
    """A delta as a piece. Servers call reasoning by either of two names."""
    functions = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return Piece(
        delta.get("content") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        call="".join(call_text(each.get("name"), each.get("arguments")) for each in functions),
    )


def call_text(name: str | None, arguments: str | None) -> str:
    """A part of a tool call for a reader: its name once, then its arguments."""
    return (f"\n[calls {name}] " if name else "") + (arguments or "")


def _message(body: bytes) -> str | None:
    """What an error object says, if `body` is one."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
