"""JSON that a model wrote, or that comes back from a client as it was written."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str) -> Any:
    """The value of `text`. Raises ValueError, also where it is nested deeper than the parser can follow."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
