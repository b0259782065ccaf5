"""What a checkpoint's generation_config.json says of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.model.defaults import sampling_defaults
from headrace.model.errors import CheckpointError


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 3, "max_new_tokens": 20, "max_length": 20, "pad_token_id": 0}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
        ),
        (
            {"temperature": 1, "top_k": None, "repetition_penalty": 1.1},
            {"temperature": 1, "repetition_penalty": 1.1},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
    ],
)
def test_fields(tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert sampling_defaults(tmp_path) == expected


def test_without_a_file(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(tmp_path / "model.gguf") == {}


def test_impossible_values_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 1.5, "temperature": 0.4}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.4}
    assert "top_p" in caplog.text


@pytest.mark.parametrize("content", ["[]", "{"])
def test_what_is_no_object_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not .*mend it"):
        sampling_defaults(tmp_path)
