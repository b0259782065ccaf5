"""Server-sent events: one `data:` line for each JSON object, and `[DONE]` at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.disconnect import ClientGoneError, unless_gone
from headrace.server.errors import from_exception
from headrace.server.generation import Generation

log = logging.getLogger(__name__)


class EventStream(Response):
    """Sends `events` as they come and cancels `generation` when the client goes away.

    An exception in `events` becomes an event with an error object: the status has gone out by then, and the
    stream still ends in [DONE] so that no client takes it for a lost connection.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Mapping[str, Any]], generation: Generation) -> None:
        self.status_code = 200
        self.background = None
        # Proxies such as nginx would otherwise hold events back to fill their buffers.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            log.debug("the client left its stream")
        finally:
            self._generation.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._lines():
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[str]:
        try:
            async for event in self._events:
                yield _data(event)
        except Exception as error:
            failure = from_exception(error)
            if failure.status == 500:
                log.exception("a stream failed")
            yield _data(failure.body)
        yield "data: [DONE]\n\n"


def _data(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
