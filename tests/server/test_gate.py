"""API keys, CORS and body limits."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

import httpx
import openai
import pytest

from headrace.server import gate
from tests.server import patient
from tests.server.scripted import Scripted, scripted_server
from tests.server.test_chat import PATH, user
from tests.server.test_errors import error_of

SERVED = {"api_keys": ("first", "second"), "cors_origins": ("http://page",), "max_body": 2000}
BODY = {"messages": user("hi")}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Scripted]:
    with scripted_server(served=SERVED) as server:
        yield server


@pytest.mark.parametrize("key", ["first", "second"])
def test_keys_are_taken_in_both_headers(guarded: Scripted, key: str) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as sdk:
        assert [model.id for model in sdk.models.list()] == ["scripted"]
    headers = {"x-api-key": key}
    message = {"max_tokens": 50, **BODY}
    assert patient.post(f"{guarded.url}/v1/messages", json=message, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Bearer first2"},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"x-api-key": "ä"},
    ],
)
def test_without_a_key_nothing_is_served(guarded: Scripted, headers: dict[str, str]) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    seen = len(guarded.engine.submitted)
    for path in (PATH, "/v1/models", "/tokenize", "/nothing"):
        error = error_of(patient.post(guarded.url + path, json=BODY, headers=encoded), 401)
        assert error["code"] == "invalid_api_key"
    response = patient.post(f"{guarded.url}/v1/messages", json=BODY, headers=encoded)
    assert response.json()["error"]["type"] == "authentication_error"
    assert len(guarded.engine.submitted) == seen


def test_health_needs_no_key(guarded: Scripted) -> None:
    assert patient.get(f"{guarded.url}/health").status_code == 200
    assert patient.head(f"{guarded.url}/").status_code == 200


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(given, known)

    monkeypatch.setattr(gate, "hmac", type("", (), {"compare_digest": staticmethod(compare)}))
    guard = gate.Gate(lambda *_: None, api_keys=("first", "second"), max_body=1)  # type: ignore[arg-type]
    assert guard._is_known(b"first")
    assert compared == [b"first", b"second"]


def test_pages_of_the_named_origin_may_call(guarded: Scripted) -> None:
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization"
    answer = patient.options(guarded.url + PATH, headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://page"
    refused = patient.post(guarded.url + PATH, json=BODY, headers={"Origin": "http://page"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://page")
    assert refused.headers["access-control-expose-headers"].lower() == "retry-after, x-request-id"
    other = patient.options(guarded.url + PATH, headers=asks | {"Origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_have_a_limit(guarded: Scripted, chunked: bool) -> None:
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * 2000 + b'"}]}'
    content = iter([body[:1500], body[1500:]]) if chunked else body
    headers = {"Authorization": "Bearer first", "Content-Type": "application/json"}
    response = patient.post(guarded.url + PATH, content=content, headers=headers)
    assert "2000 bytes" in error_of(response, 413)["message"]


def test_without_keys_everyone_may_come_in(http: httpx.Client) -> None:
    assert http.post(PATH, json=BODY, headers={"Authorization": "Bearer anything"}).status_code == 200
