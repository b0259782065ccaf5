"""What may be said about an engine: every limit is checked here, and the message names the option."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from headrace.engine.options import (
    CPU_CHUNK,
    GPU_CHUNK,
    LARGE_GPU,
    SMALL_GPU_CHUNK,
    EngineOptions,
    OptionError,
)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_sequences", 0, "is 0; give a whole number from 1 up"),
        ("max_sequences", None, "is None; give a whole number from 1 up"),
        ("max_sequences", 2.5, "is 2.5; give a whole number from 1 up"),
        ("max_context", 1, "is 1; give a whole number from 2 up"),
        ("prefill_chunk", 0, "is 0; give a whole number from 1 up"),
        ("max_decode_gap", 0.0, "is 0.0; give milliseconds above 0"),
        ("max_decode_gap", nan, "is nan; give milliseconds above 0"),
        ("kv_memory", 0, "is 0; give a whole number from 1 up"),
        ("kv_memory", "8G", "is '8G'; give a whole number from 1 up"),
        ("queue", 0, "is 0; give a whole number from 1 up"),
        ("steps", 0, "is 0; give a whole number from 1 up"),
        ("decode", "cuda", "'cuda' is not a backend; choose one of: auto, kernel, torch, oracle"),
        ("unpacked_layers", -1, "is -1; give a whole number from 0 up"),
    ],
)
def test_what_no_model_could_be_run_with_is_refused(option: str, value: Any, words: str) -> None:
    with pytest.raises(OptionError) as error:
        EngineOptions(**{option: value})
    assert error.value.option == option
    assert str(error.value) == f"{option}: {words}"


def test_the_least_of_everything_is_taken() -> None:
    EngineOptions(
        max_sequences=1, max_context=2, prefill_chunk=1, kv_memory=1, queue=1, steps=1, unpacked_layers=0
    )


@pytest.mark.parametrize(
    ("memory", "chunk"),
    [(80 * 2**30, SMALL_GPU_CHUNK), (LARGE_GPU - 1, SMALL_GPU_CHUNK), (LARGE_GPU, GPU_CHUNK)],
)
def test_a_chunk_that_nobody_asked_for_goes_by_the_device(memory: int, chunk: int) -> None:
    assert EngineOptions().chunk == CPU_CHUNK
    assert EngineOptions().on_gpu(memory).chunk == chunk
    assert EngineOptions(prefill_chunk=300).on_gpu(memory).chunk == 300
