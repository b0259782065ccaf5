"""httpx's ways to ask, for a server that may take its time."""

from __future__ import annotations

from functools import partial

import httpx

from tests.waiting import WAIT

get = partial(httpx.get, timeout=WAIT)
head = partial(httpx.head, timeout=WAIT)
options = partial(httpx.options, timeout=WAIT)
post = partial(httpx.post, timeout=WAIT)
stream = partial(httpx.stream, timeout=WAIT)


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=WAIT)
