"""The page at `/`: a chat with the model, and the figures of the moment. Static files, no build step."""

from headrace.server.page.endpoint import router

__all__ = ["router"]
