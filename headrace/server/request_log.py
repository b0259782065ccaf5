"""One line in the log for each request, of the form key=value, and what the metrics learn when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.metrics import Metrics
from headrace.server.record import Record, Timing, current

log = logging.getLogger(__name__)

ID_HEADER = "x-request-id"
_SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_PLAIN = re.compile(r"[\w./:+,-]+", re.ASCII)


class RequestLog:
    """ASGI middleware. Gives every request an id, its client's own if that sent one, and sends it back.

    Requests that only look (GET and the like) and succeed are not logged: supervisors make them all the time.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER, "")
        record = Record(
            id=given if _SAFE_ID.fullmatch(given) else f"req_{secrets.token_hex(8)}",
            method=scope["method"],
            path=scope["path"],
        )
        token = current.set(record)
        try:
            await self._app(scope, receive, _noting(send, record))
        except asyncio.CancelledError:
            record.error = record.error or "shutdown"
            raise
        except Exception:
            record.error = record.error or "internal_error"
            record.status = record.status or 500
            raise
        finally:
            current.reset(token)
            self._finish(record)

    def _finish(self, record: Record) -> None:
        seconds = time.monotonic() - record.arrival
        self._metrics.request_ended(record)
        looked = record.method in ("GET", "HEAD", "OPTIONS")
        if looked and record.error is None and (record.status or 500) < 400:
            return
        failed = record.error is not None and (record.status or 500) in (200, *range(500, 600))
        fields = describe(record, seconds)
        log.log(logging.WARNING if failed else logging.INFO, "%s", line(fields), extra={"fields": fields})


def _noting(send: Send, record: Record) -> Send:
    """`send`, which tells the record how the answer began, and the client the request's id."""

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            headers[ID_HEADER] = record.id
            record.streamed = headers.get("content-type", "").startswith("text/event-stream")
            message = {**message, "headers": headers.raw}
        await send(message)

    return noted


def describe(record: Record, seconds: float) -> dict[str, Any]:
    """The fields of a request's line; `seconds` is how long it took."""
    fields: dict[str, Any] = {"id": record.id, "method": record.method, "path": record.path}
    fields |= {"status": record.status, "stream": record.streamed}
    if record.timings:
        fields |= _generated(record)
    fields["total_ms"] = seconds * 1000
    if record.error is not None:
        fields["error"] = record.error
    return fields | {"cancelled": record.gone}


def _generated(record: Record) -> dict[str, Any]:
    timings = record.timings
    reasons = dict.fromkeys(timing.finish_reason for timing in timings if timing.finish_reason)
    return {
        "request": timings[0].request.id,  # the number that it has in the engine's own messages
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": sum(timing.tokens for timing in timings),
        "queue_ms": _milliseconds(timing.queued for timing in timings),
        "ttft_ms": _milliseconds(_first(timing) for timing in timings),
        "finish": ",".join(reasons) or None,
    }


def _first(timing: Timing) -> float | None:
    return None if timing.first is None else timing.first - timing.arrival


def _milliseconds(seconds: Any) -> float | None:
    """Of several answers, the one that was first."""
    known = [each for each in seconds if each is not None]
    return min(known) * 1000 if known else None


def line(fields: dict[str, Any]) -> str:
    """key=value, separated by spaces. What a client sent cannot begin a line or a field of its own."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.1f}"
        case str() if not _PLAIN.fullmatch(value):
            return json.dumps(value)
    return str(value)
