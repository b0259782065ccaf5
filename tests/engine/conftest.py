"""The small model that engines run, and a tokenizer for it."""

from __future__ import annotations

import pytest

from headrace.model.synthetic import synthetic_model
from headrace.model.tokenizer import Tokenizer
from headrace.model.transformer import Model
from tests.engine.north import VOCABULARY, north


@pytest.fixture(scope="module")
def model() -> Model:
    return synthetic_model(north(), seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.synthetic(VOCABULARY)
