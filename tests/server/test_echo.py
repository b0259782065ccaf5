"""`echo`: the prompt told back, with the log-probabilities of its tokens, as evaluation harnesses use it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from headrace.server.logprobs import CompletionLogprobs, echo
from tests.server.scripted import REPLY, Scripted
from tests.server.test_chat import events

PATH = "/v1/completions"


def choice_of(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return dict(choice)


@pytest.mark.parametrize("form", ["text", "ids"])
def test_the_prompt_comes_before_the_answer(http: httpx.Client, server: Scripted, form: str) -> None:
    prompt = "hi" if form == "text" else server.tokenizer.encode("hi")
    assert choice_of(http, prompt=prompt, echo=True)["text"] == "hi" + REPLY
    told = choice_of(http, prompt=prompt, echo=True, max_tokens=0)
    assert (told["text"], told["finish_reason"], told["logprobs"]) == ("hi", "length", None)


def test_logprobs_of_prompt_and_answer(http: httpx.Client) -> None:
    choice = choice_of(http, prompt="né b", echo=True, logprobs=1, max_tokens=2)
    assert choice["text"] == "né b" + REPLY[:2]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", " ", "b", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.25, -0.375, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][4] == {" t300": -9.0, "b": -0.5}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


def test_a_stream_tells_the_prompt_first(http: httpx.Client) -> None:
    body = {"prompt": "say {abc}", "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = choice_of(http, **body)
    parts = [chunk["choices"][0] for chunk in events(http.post(PATH, json=body | {"stream": True}))]
    assert parts[0]["text"].startswith("say {abc}")
    assert "".join(part["text"] for part in parts) == whole["text"] == "say {abc}abc"
    for key, values in whole["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][key]] == values


def test_several_prompts_and_choices(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="scripted", prompt=["say {x}", "yes"], n=2, echo=True, logprobs=0, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == ["say {x}x"] * 2 + ["yes" + REPLY[0]] * 2
    logprobs = answer.choices[3].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["y", "e", "s", REPLY[0]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7 + 3


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_lm_eval_sends_and_reads(http: httpx.Client, server: Scripted, max_tokens: int) -> None:
    """Its loglikelihood requests: context and continuation as one list of ids, in batches."""
    texts, context = ["The sky is blue", "The sea is wet"], len("The sky")
    body = {
        "model": "scripted",
        "prompt": [server.tokenizer.encode(text) for text in texts],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = http.post(PATH, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, text in zip(choices, texts, strict=True):
        scored = choice["logprobs"]["token_logprobs"]
        tops = choice["logprobs"]["top_logprobs"]
        assert len(scored) == len(tops) == len(text) + max_tokens
        places = range(context, len(text))
        assert [scored[place] for place in places] == [-0.125 * place for place in places]
        for place in places:
            assert scored[place] == max(tops[place].values())  # how the harness knows a greedy token


def test_a_beginning_that_nobody_wrote_has_no_place_in_the_text(server: Scripted) -> None:
    tokenizer = server.tokenizer
    ids = tokenizer.encode("<BOS_TOKEN>ab", add_special_tokens=False)
    assert len(ids) == 3
    lists = CompletionLogprobs(tokenizer)
    assert lists.echo(echo(tokenizer, "ab", ids), [])["text_offset"] == [0]
    assert lists._offset == 0
    told = echo(tokenizer, ids, ids)
    assert (told.text, told.unseen) == ("<BOS_TOKEN>ab", 0)
