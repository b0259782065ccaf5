"""The OpenAI-compatible endpoint: one module for each path, and what they share."""

from headrace.server.app import AddressError, ServerOptions, bind, create_app, run

__all__ = ["AddressError", "ServerOptions", "bind", "create_app", "run"]
