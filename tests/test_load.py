"""A model that is loaded for the kernel has its weights packed, and only once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace import load as loading
from headrace.engine.options import EngineOptions
from headrace.load import load

SOURCES: list[dict[str, Any]] = [
    {"source": "north-micro"},
    {"source": None, "synthetic": "north-micro-shape"},
]


@pytest.mark.parametrize("source", SOURCES, ids=["checkpoint", "synthetic"])
def test_packed_and_plain_models_agree(source: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions()
    plain = load(**source, device="cpu", dtype="bfloat16", options=options)
    assert plain.weights is None
    monkeypatch.setattr(loading, "choose_decode", lambda *parts, **named: "kernel")
    packed = load(**source, device="cpu", dtype="bfloat16", options=options)
    assert packed.weights is not None
    tokens = torch.arange(100)[None]
    assert torch.equal(packed.model.full(tokens), plain.model.full(tokens))
    assert load(**source, device="cpu", dtype="bfloat16").weights is None, "nobody said what for"
