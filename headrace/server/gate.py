"""Who may come in, and with how much: API keys and a limit on bodies, before anything is read or parsed."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import ApiError

# Supervisors and load balancers have no key, and the page has to be seen before it can ask for one.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/page.css", "/page.js"})


class Gate:
    """ASGI middleware. A request without one of `api_keys` (none: no keys are asked for) is a 401; a body of
    more than `max_body` bytes is a 413, whether it says its length beforehand or not.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str] = (), max_body: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        is_open = scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
        if self._keys and not is_open and not self._is_known(_key(headers)):
            return ApiError(
                401,
                "No valid API key: send one as Authorization: Bearer <key>, or as x-api-key.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            return ApiError(413, self._too_large())
        return None

    def _is_known(self, key: bytes) -> bool:
        """Compared with every key, in a time that does not tell how much of it was right."""
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0

    def _too_large(self) -> str:
        return f"The body is larger than the {self._max_body} bytes that this server takes."

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, which fails where a body passes the limit that did not say its length."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise HTTPException(413, self._too_large())  # the kind that FastAPI lets through
            return message

        return counted


def _key(headers: Headers) -> bytes:
    """The key that a client sent, as OpenAI's clients do or as Anthropic's."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode()
