"""OpenAI's Responses protocol, which Codex speaks. Nothing is stored: every request has all of its turns."""

from headrace.server.responses.endpoint import router

__all__ = ["router"]
