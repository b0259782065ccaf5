"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from headrace.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The endpoints, serving `state`."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(state)]}

    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        state.check_model(name)
        return _model(state)

    return routes


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "headrace",
        "root": state.model_name,  # what it was made from: itself. This and the next are vLLM's, and are read
        "max_model_len": state.engine.max_context,
        "default_sampling": dict(state.sampling),  # what holds where a request says nothing
    }
