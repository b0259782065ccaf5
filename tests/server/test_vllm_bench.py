"""What vLLM's bench client (`vllm bench serve`) sends and how it reads the answer.

The client itself is not here: its package is larger than all that the tests need. The facts are those of its
source, `vllm/benchmarks/lib/endpoint_request_func.py` at commit 02cfb534df56 and `vllm/benchmarks/serve.py`
at 009e6d4a1cd6, for the backends `openai` and `openai-chat`.
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from headrace.engine.backend import DecodeRow, Interrupt
from headrace.model.sampler import Sampled
from headrace.server.chat import ChatReply
from headrace.server.protocol import GenerationBody
from headrace.server.streaming import OPENAI
from tests.server import patient
from tests.server.scripted import REPLY, Scripted, scripted_server
from tests.waiting import WAIT

Body = dict[str, Any]
LENGTH = 30  # tokens asked for: more than REPLY has, so that only ignore_eos brings as many
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLING = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.0,
    "temperature": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def completion(prompt: str | list[int], **more: Any) -> Body:
    """Of the backend `openai`; `more` are ignore_eos and what its options say about sampling."""
    body = {"model": "scripted", "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": LENGTH}
    return body | {"logprobs": None} | STREAMED | more


def chat(prompt: str, **more: Any) -> Body:
    """Of the backend `openai-chat`."""
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    body = {"model": "scripted", "messages": messages, "max_completion_tokens": LENGTH}
    return body | STREAMED | more


BODIES = {COMPLETIONS: completion, CHAT: chat}


class Messages:
    """The messages of a stream, from what the network brings, however that is cut.

    Each piece is stripped before it is looked at: so most events come without the blank line behind them, and
    what is left is a message as soon as it is whole.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._left = ""

    def take(self, piece: bytes) -> list[str]:
        *whole, self._left = (self._left + self._decoder.decode(piece.strip())).split("\n\n")
        if self._left.startswith("data: ") and _is_whole(self._left.removeprefix("data: ").strip()):
            whole.append(self._left)
            self._left = ""
        return [message.strip() for message in whole if message.strip()]


def _is_whole(content: str) -> bool:
    try:
        json.loads(content)
    except json.JSONDecodeError:
        return content == "[DONE]"
    return True


@dataclass
class Reading:
    """What the client knows in the end. It has succeeded if a chunk with choices came."""

    error: str = ""
    text: str = ""
    chunks: int = 0
    steps_before: int = 0  # of the model, when the first chunk came: the client notes the time
    output_tokens: int = 0
    prompt_tokens: int | None = None
    last: str = ""
    comments: int = 0

    @property
    def succeeded(self) -> bool:
        return not self.error and self.chunks > 0

    def add(self, message: str, steps: int) -> None:
        if message.startswith(":"):
            self.comments += 1
            return
        self.last = message.removeprefix("data: ")
        if self.last == "[DONE]":
            return
        data = json.loads(self.last)
        if choices := data.get("choices"):
            if not self.chunks:
                self.steps_before = steps
            self.chunks += 1
            choice = choices[0]
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            self.text += text or ""
        elif usage := data.get("usage"):
            self.output_tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def read(
    server: Scripted,
    path: str,
    body: Body,
    *,
    number: int = 0,
    heard: Callable[[bytes], object] = lambda piece: None,
) -> Reading:
    """Send a request and read its stream as the client does. `heard` gets what the network has brought."""
    reading, messages = Reading(), Messages()
    headers = {"x-request-id": f"bench-{number}"}
    before = server.backend.steps
    with patient.stream("POST", server.url + path, json=body, headers=headers) as response:
        if response.status_code != 200:
            reading.error = response.reason_phrase
            return reading
        for piece in response.iter_raw():
            for message in messages.take(piece):
                reading.add(message, server.backend.steps - before)
            heard(piece)
    return reading


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("sampling", [{}, SAMPLING])
def test_an_answer_of_the_length_that_was_asked_for(server: Scripted, path: str, sampling: Body) -> None:
    """As for its random prompts, which ignore the end of the text."""
    reading = read(server, path, BODIES[path]("hi", ignore_eos=True, **sampling))
    assert reading.succeeded
    assert reading.text == REPLY
    assert reading.output_tokens == LENGTH
    assert reading.prompt_tokens == len(server.engine.submitted[-1].prompt)
    assert reading.last == "[DONE]"


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_ends_by_itself(server: Scripted, path: str) -> None:
    """As for prompts of a conversation."""
    reading = read(server, path, BODIES[path]("hi"))
    assert reading.succeeded
    assert reading.text == REPLY
    assert len(REPLY) < reading.output_tokens == len(server.engine.submitted[-1].output) < LENGTH


def test_a_prompt_of_tokens(server: Scripted) -> None:
    """As from a trace."""
    tokens = server.tokenizer.encode("say {ü€}")
    reading = read(server, COMPLETIONS, completion(tokens, ignore_eos=True))
    assert (reading.text, reading.output_tokens, reading.prompt_tokens) == ("ü€", LENGTH, len(tokens))


def held_up(server: Scripted, monkeypatch: pytest.MonkeyPatch, *, seconds: float = WAIT) -> threading.Event:
    """What the first step waits for, `seconds` at most."""
    run, go_on = server.backend.run, threading.Event()

    def late(
        rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        go_on.wait(seconds)
        go_on.set()
        yield from run(rows, steps, interrupt)

    monkeypatch.setattr(server.backend, "run", late)
    return go_on


@pytest.mark.parametrize("path", BODIES)
def test_the_first_chunk_is_not_there_before_the_first_token(
    server: Scripted, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client takes any chunk with choices for a token, and its time for that of the first."""
    held_up(server, monkeypatch, seconds=0.2)  # long enough for a hasty chunk to arrive
    assert read(server, path, BODIES[path]("hi")).steps_before >= 1


def test_many_at_once(server: Scripted) -> None:
    """With --max-concurrency 16, by both backends in turn."""
    with ThreadPoolExecutor(16) as pool:
        readings = list(
            pool.map(
                lambda number: read(
                    server,
                    [*BODIES][number % 2],
                    [completion, chat][number % 2](f"say {{{number}}}", ignore_eos=True),
                    number=number,
                ),
                range(48),
            )
        )
    assert all(reading.succeeded for reading in readings)
    assert [reading.text for reading in readings] == [str(number) for number in range(48)]
    assert {reading.output_tokens for reading in readings} == {LENGTH}


def test_what_is_refused_has_failed(server: Scripted) -> None:
    """It waits for a server by its first request, again and again until that succeeds."""
    reading = read(server, COMPLETIONS, completion("hi") | {"model": "other"})
    assert not reading.succeeded
    assert reading.error == "Not Found"


def test_its_questions_before_and_after(http: httpx.Client, server: Scripted) -> None:
    """The model where none is named; prompts cut to length with the server's tokenizer; and figures of
    speculative decoding and diffusion, of which there are none."""
    model = http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["root"]) == ("scripted", "scripted")
    asked = {"model": model["root"], "prompt": "a random prompt", "add_special_tokens": False}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    assert tokens == server.tokenizer.encode("a random prompt", add_special_tokens=False)
    cut = http.post("/detokenize", json={"model": model["root"], "tokens": tokens[:5]}).json()["prompt"]
    assert http.post("/tokenize", json=asked | {"prompt": cut}).json()["tokens"] == tokens[:5]
    figures = http.get("/metrics")
    assert figures.status_code == 200
    assert not any(line.startswith("vllm:") for line in figures.text.split("\n"))


def test_a_role_that_comes_at_once_is_seen(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    events = ChatReply.events

    async def hasty(self: ChatReply) -> AsyncIterator[Body]:
        yield self._chunk(0, {"role": "assistant", "content": ""})
        async for event in events(self):
            yield event

    monkeypatch.setattr(ChatReply, "events", hasty)
    go_on = held_up(server, monkeypatch)
    assert read(server, CHAT, chat("hi"), heard=lambda piece: go_on.set()).steps_before == 0


@pytest.mark.parametrize("path", BODIES)
def test_missing_usage_is_seen(server: Scripted, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationBody, "wants_usage_in_stream", False)
    reading = read(server, path, BODIES[path]("hi", ignore_eos=True))
    assert (reading.succeeded, reading.output_tokens, reading.prompt_tokens) == (True, 0, None)


EVENT = f"data: {json.dumps({'choices': [{'text': 'é€'}]}, ensure_ascii=False)}\n\n"
COMMENT = OPENAI.alive


@pytest.mark.parametrize(
    ("pieces", "chunks"),
    [
        ([EVENT, EVENT, OPENAI.end], 2),
        ([EVENT + EVENT + OPENAI.end], 2),
        ([EVENT[:9], EVENT[9:] + EVENT, OPENAI.end], 2),
        ([COMMENT + EVENT, OPENAI.end], 1),
        ([COMMENT, EVENT, EVENT, OPENAI.end], 0),  # so it is: see `EventStream`
        ([COMMENT, COMMENT, COMMENT + EVENT, EVENT, OPENAI.end], 2),
    ],
)
def test_what_it_makes_of_the_pieces_of_a_stream(pieces: list[str], chunks: int) -> None:
    messages, reading = Messages(), Reading()
    for piece in pieces:
        for message in messages.take(piece.encode()):
            reading.add(message, 0)
    assert reading.chunks == chunks
    assert reading.succeeded == (chunks > 0)


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_long_in_coming(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a queue or a long prompt comments keep the connection alive; nothing is lost by them."""
    with scripted_server(served={"keep_alive": 0.03}) as server:
        go_on = held_up(server, monkeypatch)
        reading = read(
            server,
            path,
            BODIES[path]("hi", ignore_eos=True),
            heard=lambda piece: go_on.set() if piece.startswith(b":") else None,
        )
        server.wait_idle()
    assert reading.comments
    assert (reading.text, reading.output_tokens, reading.last) == (REPLY, LENGTH, "[DONE]")
