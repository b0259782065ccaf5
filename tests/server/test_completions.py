"""Text completions through both clients."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted import CONTEXT, REPLY, VOCABULARY, Scripted
from tests.server.test_chat import events

PATH = "/v1/completions"


def test_plain_answer(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"prompt": "hi"}).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == len(REPLY) + 1


def test_stream(http: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post(PATH, json={"prompt": "hi", **options}))
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == REPLY
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(REPLY) + 1


def test_sdk_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(model="scripted", prompt="hi", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == REPLY[:4]


def test_prompts_of_every_form(http: httpx.Client, server: Scripted) -> None:
    one, two = "say {one}", "say {two}"
    ids = [server.tokenizer.encode(text) for text in (one, two)]
    forms: list[tuple[Any, list[str]]] = [
        (one, ["one"]),
        ([one, two], ["one", "two"]),
        (ids[0], ["one"]),
        (ids, ["one", "two"]),
    ]
    for prompt, expected in forms:
        answer = http.post(PATH, json={"prompt": prompt}).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == len(one) * len(expected)


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="scripted", prompt=["say {x}", "seed"], n=2, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "x"),
        (1, "x"),
        (2, "7"),
        (3, "8"),
    ]


def test_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="scripted", prompt="say {né}", logprobs=1, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {" t300": -1.0, "n": -0.5}


def test_logprobs_of_a_stream_continue_each_other(http: httpx.Client) -> None:
    body = {"prompt": "say {abc}", "logprobs": 0}
    whole = http.post(PATH, json=body).json()["choices"][0]["logprobs"]
    parts = [
        chunk["choices"][0]["logprobs"] for chunk in events(http.post(PATH, json=body | {"stream": True}))
    ]
    assert len(parts) > 1
    for key, values in whole.items():
        assert [value for part in parts for value in part[key]] == values


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [VOCABULARY]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": CONTEXT}, "prompt"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post(PATH, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split("[")[0] == param
    assert error["type"] == "invalid_request_error"
