"""Every error as OpenAI writes it: {"error": {"message", "type", "param", "code"}}, whatever went wrong.

Where Anthropic's protocol is spoken, as Anthropic writes it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.engine.request import (
    ConstraintError,
    ContextLengthError,
    EngineError,
    PromptError,
    QueueFullError,
    ScoringError,
)
from headrace.model.sampling import ParameterError
from headrace.server.description import ANTHROPIC_PATH, describe
from headrace.server.disconnect import ClientGoneError
from headrace.server.record import note_error, note_gone

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1

# What an error without a code of its own is called in the metrics and the log.
_KINDS = {
    400: "bad_request",
    404: "unknown_path",
    405: "wrong_method",
    413: "body_too_large",
}

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than success: the HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """One of a few words, for the metrics and the log."""
        return self.code or _KINDS.get(self.status, f"http_{self.status}")

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error as Anthropic writes it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._anthropic_message}}

    @property
    def _anthropic_message(self) -> str:
        # Clients know an overflow by these words.
        overflow = self.code == "context_length_exceeded"
        return f"prompt is too long: {self.message}" if overflow else self.message

    def response(self, path: str = "") -> Response:
        """The answer to a request for `path`, in the words of the protocol that lives there."""
        note_error(self.kind)
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        # In ASCII: what a client sent, and a message repeats, need not be encodable as UTF-8.
        return Response(json.dumps(body), self.status, self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's request cannot be served as it stands: 400."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, *, code: str = "busy") -> ApiError:
    """The request can be served, though not now: 429, and when to come back."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def shutting_down() -> ApiError:
    """The server ends before the answer does."""
    return ApiError(503, "The server is shutting down and cannot answer to the end.", code="shutdown")


def from_exception(error: Exception, *, prompt_param: str | None = None) -> ApiError:
    """What a client is told about `error`; `prompt_param` names the field that the prompt came in."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return bad_request(str(error), param=prompt_param, code="context_length_exceeded")
        case PromptError():
            return bad_request(f"{prompt_param}: {error}" if prompt_param else str(error), param=prompt_param)
        case ScoringError():
            return bad_request(f"{error}.", param="echo", code="unsupported")
        case ConstraintError():
            return bad_request(f"Structured output cannot be had here: {error}.", code="unsupported")
        case QueueFullError():
            return busy(str(error), code="queue_full")
        case ParameterError():
            return bad_request(str(error), param=error.parameter)
        case EngineError():
            return ApiError(503, str(error), code="engine_unavailable")
    return ApiError(500, "The server failed on this request; its log says how.", code="internal_error")


def install(app: FastAPI) -> None:
    """Answer every failure that is known with an error object, those of the framework too, and have `app`
    describe itself so. What is not known is for `Failures`.
    """
    describe(app)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    for kind in (ApiError, EngineError, ParameterError):
        app.add_exception_handler(kind, _on_error)


async def _on_error(request: Request, error: Exception) -> Response:
    return from_exception(error).response(request.url.path)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's "client closed request"; nobody reads it


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ClientDisconnect):  # in the middle of its body
        note_gone()
        return await _on_client_gone(request, error)
    message = {
        400: f"The body cannot be read as JSON: {error.__cause__ or error.detail}.",
        404: f"Unknown path {request.url.path}: there is no such endpoint.",
        405: f"{request.method} is not allowed on {request.url.path}.",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return validation_error(error.errors(), error.body).response(request.url.path)


def validation_error(errors: Sequence[Any], body: Any) -> ApiError:
    """One 400 for what pydantic found wrong with `body`, about the first field that is wrong.

    Where that may have several forms, each has its errors; the one that came furthest was probably meant.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        where = f"character {first['loc'][-1]}"
        return bad_request(f"The body is not valid JSON ({where}: {first['ctx']['error']}).")
    params = [_param(error, body) for error in errors]
    param = max((each for each in params if each.startswith(params[0])), key=len)
    if not param:
        return bad_request("The body must be a JSON object, sent with Content-Type: application/json.")
    problems = dict.fromkeys(e["msg"] for e, each in zip(errors, params, strict=True) if each == param)
    return bad_request(f"{param}: {' or '.join(problems)}", param=param)


def _param(error: Any, body: Any) -> str:
    """The field that an error is about, such as messages[0].content.

    pydantic's location also names the tried branches of unions. Following it through the body tells which
    parts are fields: a branch's name leads nowhere.
    """
    name, here = "", body
    for part in error["loc"][1:]:
        if isinstance(part, int) and isinstance(here, list) and part < len(here):
            name += f"[{part}]"
        elif isinstance(here, dict) and (part in here or error["type"] == "missing"):
            name += f".{part}" if name else str(part)
        else:
            continue
        here = here[part] if not isinstance(here, dict) or part in here else None
    return name


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
