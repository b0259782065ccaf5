"""The server keeps to its OpenAPI description, whatever is sent; schemathesis thinks of what to send."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.scripted import Scripted
from tests.waiting import WAIT

OPERATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/ready"),
)


def hammer(operation: Any, mode: GenerationMode, *, url: str, examples: int = 5) -> None:
    """Send what fits the operation's schema, or does not, and hold the answers against its description."""

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def answers_as_described(case: Any) -> None:
        # A schema does not say all: a prompt or messages, an end of the context.
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=WAIT, base_url=url)

    answers_as_described()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: str(part))
def test_answers_are_as_described(server: Scripted, method: str, path: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("takes nothing that could be wrong")
    hammer(operation, mode, url=server.url)


def test_every_operation_is_listed(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()["paths"]
    found = {(method.upper(), path) for path, each in described.items() for method in each}
    assert found == {*OPERATIONS, ("HEAD", "/")}


def test_an_answer_that_is_not_described_is_seen(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    del description["paths"]["/v1/models/{name}"]["get"]["responses"]["4XX"]
    schema = schemathesis.openapi.from_dict(description)
    with pytest.raises(FailureGroup, match="Undocumented"):
        hammer(
            schema["/v1/models/{name}"]["GET"], GenerationMode.POSITIVE, url=str(http.base_url), examples=1
        )
