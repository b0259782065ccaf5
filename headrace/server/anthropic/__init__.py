"""Anthropic's Messages protocol, which Claude Code speaks."""

from headrace.server.anthropic.endpoint import router

__all__ = ["router"]
