"""Unknown fields are tolerated and logged once; the log cannot be flooded."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace.server import protocol


def test_unknown_fields_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_noted", set())
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "x", "odd": 1}], "provider": {}}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            protocol.ChatBody.model_validate(fields)
    assert [record.getMessage() for record in caplog.records] == [
        "Ignoring the unknown request field Message.odd (said once).",
        "Ignoring the unknown request field ChatBody.provider (said once).",
    ]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_noted", noted := set[str]())
    protocol.StreamOptions.model_validate({f"field{i}": 1 for i in range(1000)})
    assert len(noted) == protocol._MAX_NOTED
