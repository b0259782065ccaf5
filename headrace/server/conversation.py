"""A conversation and its answers, whatever protocol they came in: rendered, submitted, parsed.

    conversation (messages, tools, sampling)  ->  prompt, by the checkpoint's template
                                              ->  engine requests, one for each answer
                                              ->  events, by the format's parser

Each protocol turns its requests into a Conversation, and the events into its own words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.model.constraint import Constraint
from headrace.model.sampling import SamplingParams, TokenLogprobs
from headrace.model.tokenizer import ChatTemplateError
from headrace.server.errors import bad_request
from headrace.server.formats import Event
from headrace.server.formats.machine import Lane
from headrace.server.generation import Generation
from headrace.server.sampling import choices
from headrace.server.state import ServerState
from headrace.server.structure import Structure
from headrace.server.turn import Message, Turn


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a protocol asks for.

    `messages` and `tools` are as templates read them, `variables` what else the template is given. `effort`
    is the reasoning effort, "none" for no reasoning, None for the template's own default. `max_calls` limits
    the calls in an answer (None: no limit), `structure` says what they and the words must look like. `param`
    is the request's field that the messages came in.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    answers: int = 1
    max_calls: int | None = None
    structure: Structure | None = None
    param: str = "messages"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to answer `index`; the last piece of an answer says why it ended."""

    index: int
    events: Sequence[Event]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None


class Answers:
    """The answers to a conversation, as they are made."""

    def __init__(self, generation: Generation, turns: Sequence[Turn], *, prompt_tokens: int) -> None:
        self.generation = generation
        self.turns = turns
        self.prompt_tokens = prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def reasoning_tokens(self) -> int:
        return sum(turn.reasoning_tokens for turn in self.turns)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self.generation.cached_tokens(len(self.turns))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all answers, in the order in which they are made. Who stops early cancels."""
        async for index, output in self.generation.outputs():
            turn = self.turns[index]
            part = turn.take(output)
            if turn.finish_reason is not None:
                self.generation.end(index, turn.finish_reason)
            if part.events or part.logprobs or turn.finish_reason:
                yield Piece(index, part.events, part.logprobs, turn.finish_reason)

    async def collect(self) -> list[Message]:
        """All answers; cancels what is running when it is itself cancelled."""
        messages = [Message() for _ in self.turns]
        try:
            async for piece in self.pieces():
                message = messages[piece.index]
                message.add(piece.events)
                message.logprobs += piece.logprobs
                if piece.finish_reason is not None:
                    message.finish_reason = piece.finish_reason
                    message.stop_string = self.turns[piece.index].stop_string
        finally:
            self.generation.cancel()
        return messages


async def answer(state: ServerState, conversation: Conversation) -> Answers:
    """Submit a conversation. Raises ApiError for what cannot be rendered, or what the engine refuses."""
    # Rendering and tokenizing a long conversation takes long enough to hold up other clients' streams.
    text, prompt = await asyncio.to_thread(render, state, conversation)
    constrain = await _constraints(state, conversation, text)
    # The engine would apply stop strings to thoughts and arguments too.
    jobs = choices(replace(conversation.params, stop=()), conversation.answers)
    turns = [
        Turn(state.format.parser(text), stop=conversation.params.stop, max_calls=conversation.max_calls)
        for _ in jobs
    ]
    generation = state.submit(
        [prompt], jobs, param=conversation.param, keep_markers=state.format.keeps_markers, constrain=constrain
    )
    return Answers(generation, turns, prompt_tokens=len(prompt))


async def _constraints(
    state: ServerState, conversation: Conversation, prompt: str
) -> Callable[[], Constraint | None]:
    """What makes the constraint of each answer. Raises ApiError 400 for what no grammar can say."""
    if conversation.structure is None:
        return lambda: None
    make = await state.grammars.prepare(conversation.structure)
    return partial(make, state.format.parser(prompt).lane is Lane.THINKING)


def render(state: ServerState, conversation: Conversation) -> tuple[str, list[int]]:
    """The conversation as the model's prompt, by the checkpoint's own template. Raises ApiError 400."""
    variables = {} if conversation.effort is None else state.format.variables(conversation.effort)
    try:
        text = state.tokenizer.render_chat(
            conversation.messages,
            tools=conversation.tools or None,
            **variables | dict(conversation.variables),
        )
    except ChatTemplateError as error:
        raise bad_request(f"{conversation.param}: {error}", param=conversation.param) from error
    # The template writes the special tokens.
    return text, state.encode(text, param=conversation.param, add_special_tokens=False)
