"""`GET /health`: whether the server lives. `GET /ready`: whether it can serve.

`HEAD /`: whether anybody is there, which Claude Code asks.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from headrace.server.errors import ApiError
from headrace.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The endpoints, serving `state`.

    A supervisor restarts what is not healthy: only a dead engine is that. A load balancer leaves out what is
    not ready: an engine that has not started yet, or ends, too.
    """
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)  # what some supervisors send in GET's place
    @routes.get("/health")
    async def health() -> dict[str, str]:
        if state.engine.dead:
            message = state.engine.unready or "the engine has ended"
            raise ApiError(503, f"{message}; restart the server", code="engine_unavailable")
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready")
    async def ready() -> dict[str, str]:
        reason = state.engine.unready
        if reason is not None:
            raise ApiError(503, f"Not ready: {reason}.", code="engine_unavailable")
        return {"status": "ready", "model": state.model_name}

    @routes.head("/")
    async def root() -> Response:
        return Response()

    return routes
