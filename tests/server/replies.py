"""What comes back from protocols that name their events: whole answers, and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """The object that answers a request, which must have gone well."""
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type, and there is no [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
