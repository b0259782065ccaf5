"""Answers to what nothing else has answered: failures of our own, and what the server's end cuts off."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import from_exception, shutting_down
from headrace.server.record import current

log = logging.getLogger(__name__)


class Failures:
    """ASGI middleware, inside those that give every answer its headers.

    The framework's own answer to a failure passes by them, and ends the connection. uvicorn cancels what
    still runs when answers have had their time at the server's end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
            return
        except asyncio.CancelledError:
            if begun or scope["type"] != "http":
                raise
            answer = shutting_down()
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            record = current.get()
            log.exception("the request %s failed", "-" if record is None else record.id)
            answer = from_exception(error)
        await answer.response(scope["path"])(scope, receive, send)
