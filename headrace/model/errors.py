"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, tensor or field and says what to do."""
