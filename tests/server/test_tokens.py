"""Text to tokens and back over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.scripted import CONTEXT, VOCABULARY, Scripted
from tests.server.test_chat import TOOL, user
from tests.server.test_errors import error_of


def test_text(http: httpx.Client, server: Scripted) -> None:
    answer = http.post("/tokenize", json={"prompt": "né", "return_token_strs": True}).json()
    tokens = server.tokenizer.encode("né")
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), CONTEXT)
    assert answer["token_strs"][0] == "n"
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "né"}


def test_messages(http: httpx.Client, server: Scripted) -> None:
    body: dict[str, Any] = {"messages": user("hi"), "tools": [TOOL]}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == server.tokenizer.apply_chat_template(user("hi"), tools=[TOOL])
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("<|CHATBOT_TOKEN|><|START_THINKING|>")
    closed = http.post("/tokenize", json=body | {"add_generation_prompt": False}).json()["tokens"]
    assert closed == tokens[:-3]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/detokenize", {"tokens": [VOCABULARY]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_errors(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(http.post(path, json=body), 400)["param"] == param
