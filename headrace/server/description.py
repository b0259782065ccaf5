"""The OpenAPI description of the endpoints, at /openapi.json: what FastAPI makes of them, put right.

FastAPI describes the errors of its own that never leave this server, and of answers only what a signature can
say. What they are is written here: the error objects of each protocol, streams, and what is not JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

ANTHROPIC_PATH = "/v1/messages"
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
OTHER_TYPES = {"/metrics": "text/plain"}

_TEXT = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}}
ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _MAYBE, "code": _MAYBE},
        }
    },
}
ANTHROPIC_ERROR = {
    "title": "AnthropicError",
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}


def describe(app: FastAPI) -> None:
    """Let `app` describe itself as it behaves."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = corrected(generated())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of changing the description


def corrected(description: Mapping[str, Any]) -> dict[str, Any]:
    """FastAPI's description with the answers that are given."""
    components = dict(description.get("components", {}))
    ours = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    schemas = {**components.get("schemas", {}), **ours}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    paths = {
        path: {method: _operation(path, method, each) for method, each in operations.items()}
        for path, operations in description["paths"].items()
    }
    return {**description, "paths": paths, "components": {**components, "schemas": schemas}}


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    responses = {code: each for code, each in operation["responses"].items() if code != "422"}
    if (good := responses.get("200")) is not None:
        responses["200"] = _good(path, method, good)
    name = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    failure = {
        "description": "The request failed",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }
    return {**operation, "responses": {**responses, "4XX": failure, "5XX": failure}}


def _good(path: str, method: str, response: Mapping[str, Any]) -> dict[str, Any]:
    if method == "head":
        return {key: each for key, each in response.items() if key != "content"}
    if path in OTHER_TYPES:
        return {**response, "content": {OTHER_TYPES[path]: {"schema": _TEXT}}}
    if path in STREAMED:
        stream = {"text/event-stream": {"schema": _EVENT}}
        return {**response, "content": {"application/json": {"schema": {"type": "object"}}, **stream}}
    return dict(response)
