"""Chat completions through both clients."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted import CONTEXT, REPLY, TURN_TOKENS, Scripted

PATH = "/v1/chat/completions"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event of a stream, which must end in [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_plain_answer(http: httpx.Client, server: Scripted) -> None:
    answer = http.post(PATH, json={"model": "scripted", "messages": user("hi")}).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "scripted"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = len(server.tokenizer.apply_chat_template(user("hi")))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(REPLY) + TURN_TOKENS,  # a token a character, and the end of the turn
        "total_tokens": prompt + len(REPLY) + TURN_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_sdk_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=7,  # two markers and five letters
    )
    assert answer.choices[0].message.content == REPLY[:5]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_stream_has_role_text_and_reason_in_this_order(http: httpx.Client) -> None:
    chunks = events(http.post(PATH, json={"messages": user("hi"), "stream": True}))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == REPLY
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}


def test_stream_reports_usage_only_when_asked(http: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post(PATH, json={"messages": user("hi"), **options}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(REPLY) + TURN_TOKENS
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_sdk_stream(sdk: openai.OpenAI) -> None:
    text, usage = "", None
    for chunk in sdk.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "say {néé €}"}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "néé €"
    assert usage is not None
    assert usage.completion_tokens == len("néé €".encode()) + TURN_TOKENS


def test_no_event_holds_half_a_character(http: httpx.Client) -> None:
    said = "né€😀!"  # one, two, three and four bytes, and each byte is a token
    chunks = events(http.post(PATH, json={"messages": user(f"say {{{said}}}"), "stream": True}))
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert [piece for piece in pieces if piece] == list(said)


@pytest.mark.parametrize("stop", ["ll", ["zz", "ll"]])
def test_stop_strings_end_the_text_before_them(http: httpx.Client, stop: str | list[str]) -> None:
    body = {"messages": user("hi"), "stop": stop}
    choice = http.post(PATH, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "stop")
    chunks = events(http.post(PATH, json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "He"


def test_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "say {é}"}],
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].message.content == "é"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]
    assert [entry.token for entry in logprobs.content] == ["\ufffd", "\ufffd"]
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -0.5]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [
        (" t300", -1.0),
        (" t301", -2.0),
    ]


def test_stream_gives_every_token_its_logprobs(http: httpx.Client) -> None:
    body = {"messages": user("say {é€}"), "logprobs": True, "stream": True}
    chunks = events(http.post(PATH, json=body))
    entries = [
        entry
        for chunk in chunks
        if (logprobs := chunk["choices"][0]["logprobs"])
        for entry in logprobs["content"]
    ]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é€"
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_choices_have_seeds_of_their_own(http: httpx.Client) -> None:
    body = {"messages": user("seed"), "n": 3, "seed": 41}
    answer = http.post(PATH, json=body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["41", "42", "43"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 3 * (2 + TURN_TOKENS)
    chunks = events(http.post(PATH, json=body | {"stream": True}))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["41", "42", "43"]
    unseeded = http.post(PATH, json={"messages": user("seed"), "n": 2}).json()["choices"]
    assert unseeded[0]["message"]["content"] != unseeded[1]["message"]["content"]


def test_without_a_limit_the_answer_may_fill_the_context(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"messages": user("no end")}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_is_said_in_openais_words(http: httpx.Client, stream: bool) -> None:
    for body in ({"messages": user("x" * 3000)}, {"messages": user("hi"), "max_tokens": CONTEXT}):
        response = http.post(PATH, json=body | {"stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert error["message"].startswith(
            f"This model's maximum context length is {CONTEXT} tokens. However, you"
        )


def test_sdk_sees_the_overflow_as_a_bad_request(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        sdk.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.code == "context_length_exceeded"


def test_ragged_requests_at_the_same_time(http: httpx.Client) -> None:
    """More of them than the engine runs at once, streamed and not, each with its own text and length."""

    def ask(index: int) -> str:
        said = f"{index}:" + "xyz" * (index % 7)
        body = {"messages": user("pad " * (3 * index) + f"say {{{said}}}")}
        if index % 2:
            return str(http.post(PATH, json=body).json()["choices"][0]["message"]["content"])
        chunks = events(http.post(PATH, json=body | {"stream": True}))
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    assert answers == [f"{index}:" + "xyz" * (index % 7) for index in range(24)]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"path": {"type": "string"}},
        },
        "strict": True,
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}

# What clients are known to send, each of which must be answered.
TOLERATED: dict[str, dict[str, Any]] = {
    "OpenCode's title": {
        "messages": [{"role": "system", "content": "Title."}, *user("a"), *user("b")],
        "reasoning_effort": "none",
        "max_tokens": 32,
    },
    "OpenCode's turn": {
        "messages": [
            *user("a"),
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "text"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
    },
    "OpenCode's turn with North": {  # Cohere's own service would else put citations into the answer
        "messages": user("a"),
        "reasoning_effort": "high",
        "citation_options": {"mode": "OFF"},
        "stream_options": {"include_usage": True},
    },
    "LiteLLM: no content": {
        "messages": [
            *user("a"),
            {"role": "assistant", "tool_calls": [CALL], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]},
        ],
    },
    "pi": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "reasoning": "hm"},
            *user("b"),
        ],
        "max_completion_tokens": 10,
        "reasoning_effort": "medium",
        "store": False,
    },
    "guidellm": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_completion_tokens": 3,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "nulls": dict.fromkeys(
        ("max_tokens", "temperature", "top_p", "stop", "seed", "n", "tools", "logit_bias", "stream", "user")
    )
    | {"messages": user("a")},
    "unknown fields": {
        "messages": [{"role": "user", "content": "a", "cache_control": {}}],
        "provider": {"x": 1},
    },
    "assistant last": {"messages": [*user("a"), {"role": "assistant", "content": "I was"}]},
    "systems in a row": {
        "messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    },
    "a call that was cut off": {
        "messages": [
            *user("a"),
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "read", "arguments": '{"pa'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "failed"},
        ]
    },
    "sampling": {
        "messages": user("a"),
        "temperature": 1,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "seed": -3,
        "stop": [],
        "user": "me",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"reasoning": False},
        "response_format": {"type": "text"},
    },
}


@pytest.mark.parametrize("name", TOLERATED)
def test_tolerates_what_clients_send(http: httpx.Client, name: str) -> None:
    response = http.post(PATH, json={"model": "scripted"} | TOLERATED[name])
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"]


def test_tools_reach_the_template(http: httpx.Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        body = {"messages": user("a"), **fields}
        return int(http.post(PATH, json=body).json()["usage"]["prompt_tokens"])

    plain = prompt_tokens()
    assert prompt_tokens(tools=[TOOL]) > plain + len("Read a file")
    assert prompt_tokens(tools=[TOOL], tool_choice="none") == plain
    assert prompt_tokens(reasoning_effort="none") == plain + 1  # the thinking block is closed at once
    assert prompt_tokens(chat_template_kwargs={"reasoning": False}) == plain + 1
    both = prompt_tokens(reasoning_effort="none", chat_template_kwargs={"reasoning_effort": "high"})
    assert both == plain  # what is said to the template itself is the more exact
