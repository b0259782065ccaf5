"""Whether the server lives, and whether it can serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx

from headrace.engine.async_engine import AsyncEngine
from headrace.load import Loaded
from tests.engine.test_engine import text_engine
from tests.server import patient
from tests.server.scripted import Scripted, config, scripted_server, serving
from tests.server.test_chat import PATH, user
from tests.server.test_errors import error_of
from tests.waiting import until


def statuses(url: str) -> tuple[int, int]:
    """Of /health and /ready, by GET and by HEAD alike."""
    health, ready = (
        {ask(f"{url}/{path}").status_code for ask in (patient.get, patient.head)}
        for path in ("health", "ready")
    )
    [one], [other] = health, ready
    return one, other


def test_an_engine_at_work(http: httpx.Client, server: Scripted) -> None:
    assert server.engine.alive
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready", "model": "scripted"}
    assert http.head("/").status_code == 200


def test_before_the_engine_has_started_the_server_lives_and_is_not_ready() -> None:
    core = text_engine()
    engine = AsyncEngine(core)
    loaded = Loaded("late", cast(Any, SimpleNamespace(config=config())), core._tokenizer)
    with serving(loaded, engine) as url:
        assert statuses(url) == (200, 503)
        reason = error_of(patient.get(f"{url}/ready"), 503)["message"]
        assert reason == "Not ready: the engine has not started yet."
        engine.start()
        assert statuses(url) == (200, 200)
        engine.close()
        assert statuses(url) == (503, 503)
        assert "shutting down" in error_of(patient.get(f"{url}/ready"), 503)["message"]


def test_a_dead_engine_is_neither() -> None:
    with scripted_server() as server:
        patient.post(server.url + PATH, json={"messages": user("crash")})
        until(lambda: not server.engine.alive)
        assert statuses(server.url) == (503, 503)
        for path in ("/health", "/ready"):
            error = error_of(patient.get(server.url + path), 503)
            assert "the script says so" in error["message"]
            assert error["code"] == "engine_unavailable"


def test_no_key_is_needed() -> None:
    with scripted_server(served={"api_keys": ("key",)}) as server:
        assert statuses(server.url) == (200, 200)
