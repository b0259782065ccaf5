"""`GET /` and the two files that the page needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

# The page loads nothing from elsewhere, runs nothing but its own script, and cannot be framed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
_FILES["/page.js"] = ("page.js", "text/javascript")


def router() -> APIRouter:
    """The endpoints. They need no key: the page asks for it, and what it then asks for does need it."""
    routes = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        routes.add_api_route(path, _file(name, media_type), methods=["GET"])
    return routes


def _file(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = files(__package__).joinpath(name).read_bytes()

    async def get_file() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return get_file
