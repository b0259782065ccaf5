"""How a checkpoint wants to be sampled where nobody says otherwise: its generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from headrace.model.errors import CheckpointError
from headrace.model.sampling import ParameterError, SamplingParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

logger = logging.getLogger(__name__)


def sampling_defaults(path: Path) -> dict[str, Any]:
    """The SamplingParams that the model in folder `path` asks for; none for a .gguf file.

    `do_sample: false` means greedy, whatever stands beside it. The tokens that end an answer are the
    tokenizer's matter, and lengths are the context's. An impossible value is left out, with a warning.

    Raises CheckpointError if generation_config.json is no JSON object.
    """
    file = path / FILE
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}); mend it, or take it out") from error
    if not isinstance(given, dict):
        raise CheckpointError(f"{file} is not a JSON object; mend it, or take it out")
    if given.get("do_sample") is False:
        return {"temperature": 0.0}
    return {
        name: given[name] for name in FIELDS if given.get(name) is not None and _is_valid(file, name, given)
    }


def _is_valid(file: Path, name: str, given: dict[str, Any]) -> bool:
    try:
        SamplingParams(**{name: given[name]})
    except ParameterError as error:
        logger.warning("Leaving out what %s says of sampling: %s", file, error)
        return False
    return True
