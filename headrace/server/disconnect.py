"""Work that ends when the client goes away.

A server only learns that a client is gone by listening for it. So the work and a listener run side by side
and whichever ends first ends the other, as in starlette's StreamingResponse. Here this also holds for answers
that are not streamed, whose clients would otherwise be missed only when everything has been computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from headrace.server.record import note_gone

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGoneError raised, if the client disconnects first.

    The request's body must have been read: the next message on `receive` is then the disconnect.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        note_gone()
        raise ClientGoneError
    finally:
        for each in (task, listener):
            each.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
