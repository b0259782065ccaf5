"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from functools import reduce
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine.request import Output
from headrace.server.disconnect import unless_gone
from headrace.server.errors import bad_request
from headrace.server.generation import Answer, Generation
from headrace.server.logprobs import CompletionLogprobs, Echo, echo, joined
from headrace.server.protocol import CompletionBody
from headrace.server.sampling import choices, completion_sampling
from headrace.server.state import ServerState
from headrace.server.streaming import EventStream
from headrace.server.usage import usage

MAX_PROMPTS = 1024  # in one request


def router(state: ServerState) -> APIRouter:
    """The endpoint, serving `state`."""
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        state.check_model(body.model)
        _refuse_unsupported(body)
        params = choices(completion_sampling(body, state.sampling), body.n)
        prompts = await asyncio.to_thread(token_prompts, state, body.prompt)
        generation = state.submit(prompts, params, param="prompt")
        reply = CompletionReply(state, body, prompts, generation)
        if body.stream:
            return EventStream(reply.events(), generation, keep_alive=state.keep_alive)
        answers = await unless_gone(request.receive, generation.collect())
        return JSONResponse(reply.complete(answers))

    return routes


def token_prompts(
    state: ServerState, prompt: str | list[str] | list[int] | list[list[int]]
) -> list[list[int]]:
    """The prompts of a request as token ids. Raises ApiError 400 for too many."""
    if isinstance(prompt, str):
        return [_encoded(state, prompt)]
    if not prompt or isinstance(prompt[0], int):
        ids: Any = prompt
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(
            f"prompt: {len(prompt)} prompts in one request; send at most {MAX_PROMPTS}", param="prompt"
        )
    return [_encoded(state, each) if isinstance(each, str) else each for each in prompt]


def _encoded(state: ServerState, text: str) -> list[int]:
    return state.encode(text, param="prompt", add_special_tokens=True)


def _refuse_unsupported(body: CompletionBody) -> None:
    """Raises ApiError 400 for what would change the answer and cannot be done."""
    unsupported = {
        "suffix": bool(body.suffix),
        "best_of": body.best_of is not None and body.best_of != (body.n or 1),
    }
    for name, asked in unsupported.items():
        if asked:
            raise bad_request(f"{name}: is not supported by this server; leave it out", param=name)


class CompletionReply:
    """What a text completion answers, in one object or in chunks. Choice p * n + i is prompt p's choice i."""

    def __init__(
        self,
        state: ServerState,
        body: CompletionBody,
        prompts: Sequence[Sequence[int]],
        generation: Generation,
    ) -> None:
        self._state = state
        self._body = body
        self._prompts = prompts
        self._generation = generation
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._logprobs = [CompletionLogprobs(state.tokenizer) for _ in range(generation.size)]
        # The choices that have not told their prompt yet.
        self._silent = set(range(generation.size)) if body.echo else set()

    def complete(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head(),
            "choices": [self._choice(i, answer, answer.finish_reason) for i, answer in enumerate(answers)],
            "usage": self._usage(sum(len(answer.token_ids) for answer in answers)),
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks: text as it comes, why each choice ended, then the usage if it was asked for."""
        completion_tokens = 0
        async for index, output in self._generation.outputs():
            completion_tokens += len(output.token_ids)
            told = output.text or output.finish_reason or index in self._silent
            if told or (self._body.logprobs is not None and output.logprobs):
                yield {**self._head(), "choices": [self._choice(index, output, output.finish_reason)]}
        if self._body.wants_usage_in_stream:
            yield {**self._head(), "choices": [], "usage": self._usage(completion_tokens)}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        cached = self._generation.cached_tokens(self._body.n or 1)
        return usage(sum(map(len, self._prompts)), completion_tokens, cached_tokens=cached)

    def _choice(self, index: int, part: Answer | Output, finish_reason: str | None) -> dict[str, Any]:
        text, logprobs = part.text, None
        prompt = self._echo(index)
        if self._body.logprobs is not None:
            lists = self._logprobs[index]
            told = [] if prompt is None else [lists.echo(prompt, self._generation.prompt_logprobs(index))]
            logprobs = reduce(joined, [*told, lists.next(part.logprobs)])
        if prompt is not None:
            text = prompt.text + text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, index: int) -> Echo | None:
        """The prompt of a choice, if it is to be told and has not been yet."""
        if index not in self._silent:
            return None
        self._silent.remove(index)
        number, given = index // (self._body.n or 1), self._body.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return echo(self._state.tokenizer, given[number] if several else given, self._prompts[number])

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._state.model_name,
        }
