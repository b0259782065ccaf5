"""Server-sent events, in the dialect of each protocol, with a sign of life in long silences."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.disconnect import ClientGoneError, unless_gone
from headrace.server.errors import ApiError, from_exception, shutting_down
from headrace.server.generation import Generation
from headrace.server.record import note_error

log = logging.getLogger(__name__)

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a protocol writes a stream: its events, a failure after the first of them, its end."""

    encode: Callable[[Event], str]
    failure: Callable[[ApiError], Event]
    end: str = ""
    alive: str = ": keep-alive\n\n"  # a comment, which every client skips


# To some clients these end a line too, as they do to Python's splitlines: httpx's iter_lines is one.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def data_line(event: Event) -> str:
    """An event that is told by its content."""
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text if text.isascii() else text.translate(_LINE_ENDS)}\n\n"


def named_event(event: Event) -> str:
    """An event that has its type as its name too."""
    return f"event: {event['type']}\n{data_line(event)}"


OPENAI = Dialect(encode=data_line, failure=lambda error: error.body, end="data: [DONE]\n\n")


class EventStream(Response):
    """Sends `events` as they come and cancels `generation` when the client goes away.

    An exception in `events` becomes an event with an error object: the status has gone out by then, and the
    stream still ends as the dialect says, so that no client takes it for a lost connection. Nothing sent for
    `keep_alive` seconds (0: never mind) brings a comment line: clients and proxies give up on silence.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Event],
        generation: Generation,
        *,
        dialect: Dialect = OPENAI,
        keep_alive: float = 0.0,
    ) -> None:
        self.status_code = 200
        self.background = None
        # Proxies such as nginx would otherwise hold events back to fill their buffers.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._generation = generation
        self._dialect = dialect
        self._keep_alive = keep_alive
        self._begun = False
        self._last = 0.0
        self._kept_alive = False  # whether a sign of life was the last that was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            log.debug("the client left its stream")
        except asyncio.CancelledError:
            if not self._begun:
                raise
            with contextlib.suppress(asyncio.CancelledError):  # again, by whom the client kept waiting for it
                await self._cut_off(send)
        finally:
            self._generation.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._begun = True
        alive = asyncio.ensure_future(self._send_signs_of_life(send)) if self._keep_alive else None
        try:
            async for line in self._lines():
                await self._send(send, self._resumed(line))
        finally:
            if alive is not None:
                alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _cut_off(self, send: Send) -> None:
        """The server ends: the client is told so in place of the rest."""
        for line in self._failure(shutting_down()):
            await self._send(send, line)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _resumed(self, line: str) -> str:
        """The line, after a silence with a comment before it.

        vLLM's bench client strips what the network brings, and with it the end of a comment that came alone:
        it would take all that follows for a part of that. One that comes with the event ends both.
        """
        again = self._kept_alive and self._dialect.alive.startswith(":")
        self._kept_alive = False
        return self._dialect.alive + line if again else line

    async def _send(self, send: Send, line: str) -> None:
        self._last = asyncio.get_running_loop().time()
        # What a model writes need not be encodable: JSON can hold half a surrogate pair.
        await send({"type": "http.response.body", "body": line.encode(errors="replace"), "more_body": True})

    async def _send_signs_of_life(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            wait = self._last + self._keep_alive - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                self._kept_alive = True
                await self._send(send, self._dialect.alive)

    async def _lines(self) -> AsyncIterator[str]:
        encode = self._dialect.encode
        try:
            async for event in self._events:
                yield encode(event)
        except Exception as error:
            failure = from_exception(error)
            if failure.status == 500:
                log.exception("a stream failed")
            for line in self._failure(failure):
                yield line
            return
        if self._dialect.end:
            yield self._dialect.end

    def _failure(self, failure: ApiError) -> Iterator[str]:
        """What ends a stream that cannot go on."""
        note_error(failure.kind)
        yield self._dialect.encode(self._dialect.failure(failure))
        if self._dialect.end:
            yield self._dialect.end
