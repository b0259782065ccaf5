"""The list of models."""

from __future__ import annotations

import httpx
import openai

from tests.server.scripted import CONTEXT
from tests.server.test_errors import error_of


def test_models(http: httpx.Client, sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    assert sdk.models.retrieve("scripted").owned_by == "headrace"
    model = http.get("/v1/models").json()["data"][0]
    assert model["object"] == "model"
    assert model["max_model_len"] == CONTEXT
    assert model["default_sampling"] == {}


def test_another_model(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/models/org/other"), 404)["code"] == "model_not_found"
