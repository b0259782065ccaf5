"""Ways to ask a server that may take its time, with a connection for each request.

A server closes a connection that is idle for some seconds, maybe just when it is to be used again.
"""

from __future__ import annotations

from functools import partial

import httpx
import openai

from tests.waiting import WAIT

CLOSE = {"Connection": "close"}

get = partial(httpx.get, timeout=WAIT)
head = partial(httpx.head, timeout=WAIT)
options = partial(httpx.options, timeout=WAIT)
post = partial(httpx.post, timeout=WAIT)
stream = partial(httpx.stream, timeout=WAIT)


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=WAIT, headers=CLOSE)


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT, default_headers=CLOSE
    )
