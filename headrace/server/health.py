"""`GET /health`: whether the engine lives. `HEAD /`: whether anybody is there, which Claude Code asks."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from headrace.server.errors import ApiError
from headrace.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The endpoint, serving `state`. A dead engine answers 503: only a restart helps, so a supervisor may."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        if not state.engine.alive:
            message = state.engine.error or "the engine is not running"
            raise ApiError(503, f"{message}; restart the server", code="engine_unavailable")
        return {"status": "ok"}

    @routes.head("/")
    async def root() -> Response:
        return Response()

    return routes
