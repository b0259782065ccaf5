"""The Python API: a model in this process, given prompts in batches or one by one as a stream.

from headrace import LLM, SamplingParams

with LLM("smollm2") as llm:
    for answer in llm.generate(["The capital of France is", "1 + 1 ="], SamplingParams(max_tokens=20)):
        print(answer.text)
    for piece in llm.stream([{"role": "user", "content": "Tell me a story."}]):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import collections
import queue
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import (
    EngineDeadError,
    FinishReason,
    Output,
    OutputSink,
    QueueFullError,
    Request,
)
from headrace.load import Loaded, load
from headrace.model.progress import Progress
from headrace.model.sampling import SamplingParams, TokenLogprobs
from headrace.server.formats import Content, Event, Reasoning, choose_format
from headrace.server.turn import Call, Message, Turn

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # of typing from Python 3.13 on

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_BUSY_SECONDS = 0.05  # how long to wait when others have filled the queue


class GenerationError(RuntimeError):
    """The engine failed while it worked on a prompt; the message says how.

    `completions` are those of the whole batch: what the other prompts gave is not lost. `failed` are the
    places of the prompts that failed, in order.
    """

    def __init__(
        self, message: str, completions: Sequence[Completion] = (), failed: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.completions, self.failed = list(completions), list(failed)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one prompt and its continuation."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Completion:
    """What the model made of one prompt. `logprobs` and `prompt_logprobs` are empty unless asked for.

    Of the answer to a conversation `text` is what was said; `reasoning` and `calls` stand apart from it, and
    the markers between them are not shown.
    """

    usage: Usage
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        message = Message(self.reasoning, self.text, self.calls)
        message.add(piece.events)
        self.text, self.reasoning = message.content, message.reasoning
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason or ""
        self.usage = Usage(self.usage.prompt_tokens, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to an answer; the last piece, and no other, has a `finish_reason`.

    `events` are `Content`, `Reasoning` and the parts of tool calls (`headrace.server.formats.events`), in
    the order in which the model made them.
    """

    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(event.text for event in self.events if isinstance(event, Content))

    @property
    def reasoning(self) -> str:
        """What was thought before it was said."""
        return "".join(event.text for event in self.events if isinstance(event, Reasoning))


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt on its way; the answer to a conversation has a turn, which parts it."""

    prompt: list[int]
    params: SamplingParams
    turn: Turn | None = None

    def submit(self, engine: AsyncEngine, sink: OutputSink) -> Request:
        # Whoever parts an answer needs its markers as text.
        return engine.submit(self.prompt, self.params, sink, keep_markers=self.turn is not None)

    def read(self, output: Output) -> Piece:
        """An output as a piece of the answer. Raises GenerationError if the engine failed."""
        if output.finish_reason is FinishReason.ERROR:
            raise GenerationError(output.error or "the engine failed")
        if self.turn is None:
            events = [Content(output.text)] if output.text else []
            return Piece(events, output.token_ids, output.logprobs, output.finish_reason)
        part = self.turn.take(output)
        return Piece(part.events, output.token_ids, output.logprobs, self.turn.finish_reason)


class LLM:
    """A loaded model and its engine, on a thread of its own until `close`.

    `source` is a Hugging Face folder, a .gguf file, or a built-in name such as "smollm2"; or None with
    `synthetic` naming a geometry to fill with random weights. `options` are the fields of EngineOptions.
    `sampling` is what holds for a prompt without parameters: what the checkpoint's generation_config.json
    asks for, unless `generation_config` is "none". `weights_cache` is where packed weights are kept for the
    next start, as in `headrace.load.load`.

    Raises what `headrace.load.load` and `headrace.engine.build.build_engine` raise; the message says what to
    change.
    """

    def __init__(
        self,
        source: str | None = None,
        *,
        synthetic: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        generation_config: str = "model",
        weights_cache: str = "auto",
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        engine_options = EngineOptions(**options)  # before the load, so that a mistake shows at once
        loaded = load(
            None if source is None else str(source),
            synthetic=synthetic,
            device=device,
            dtype=dtype,
            options=engine_options,
            generation_config=generation_config,
            weights_cache=weights_cache,
            progress=progress,
        )
        engine = AsyncEngine(
            build_engine(
                loaded.model,
                loaded.tokenizer,
                engine_options,
                weights=loaded.weights,
                unpacked=loaded.unpacked,
            )
        )
        engine.start()
        self._attach(loaded, engine)

    @classmethod
    def over(cls, loaded: Loaded, engine: AsyncEngine) -> LLM:
        """An LLM over an engine that runs already; `close` closes it."""
        llm = cls.__new__(cls)
        llm._attach(loaded, engine)
        return llm

    def _attach(self, loaded: Loaded, engine: AsyncEngine) -> None:
        self.name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.sampling = SamplingParams(**loaded.sampling)
        self._format = choose_format(loaded.tokenizer)
        self._engine = engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue each prompt: text or token ids, one or a list of them. One completion each, in order.

        `params` are for all prompts, or a list with one for each.

        Raises EngineError for a prompt that the engine cannot take, ParameterError for parameters that name
        tokens which the model does not have, TextError for a prompt that is no text, and GenerationError,
        when all others have ended, if it fails on one, or altogether.
        """
        listed = [prompts] if _is_prompt(prompts) else prompts
        given = _spread(self._params(params), len(listed))
        return _Batch(self._engine, list(map(self._continuation, listed, given))).run()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **variables: Any,
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of them. `variables` reach the chat template.

        A stop string ends what is said, and neither thoughts nor the arguments of calls.

        Raises ChatTemplateError besides what `generate` raises.
        """
        conversations = [messages] if _is_conversation(messages) else messages
        given = _spread(self._params(params), len(conversations))
        jobs = [self._turn(each, own, variables) for each, own in zip(conversations, given, strict=True)]
        return _Batch(self._engine, jobs).run()

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> Generator[Piece, None, None]:
        """The pieces of one answer as they are made; leaving the iteration cancels it.

        The request is queued at the first `next`, which raises what `generate` would.
        """
        given = self.sampling if params is None else params
        if _is_conversation(prompt):
            job = self._turn(prompt, given, variables)
        else:
            job = self._continuation(prompt, given)
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        request, running = job.submit(self._engine, outputs.put), True
        try:
            while True:
                output = outputs.get()
                running = output.finish_reason is None
                piece = job.read(output)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if running:  # a needless cancellation would cut short the call that decodes for others
                self._engine.cancel(request)

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.sampling if given is None else given

    def _continuation(self, prompt: Prompt, params: SamplingParams) -> _Job:
        return _Job(self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt), params)

    def _turn(self, messages: Conversation, params: SamplingParams, variables: Mapping[str, Any]) -> _Job:
        text = self.tokenizer.render_chat(messages, **variables)
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        turn = Turn(self._format.parser(text), stop=params.stop)
        return _Job(prompt, replace(params, stop=()), turn)


class _Batch:
    """Prompts on their way through the engine, with no more of them queued than its queue holds."""

    def __init__(self, engine: AsyncEngine, jobs: Sequence[_Job]) -> None:
        self._engine = engine
        self._jobs = jobs
        self._waiting = collections.deque(range(len(jobs)))
        self._completions = [Completion(Usage(len(job.prompt), 0)) for job in jobs]
        self._outputs: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        self._running: dict[int, Request] = {}
        self._failures: dict[int, str] = {}

    def run(self) -> list[Completion]:
        try:
            while self._waiting or self._running:
                self._submit()
                self._receive()
            if self._failures:
                [message, *_] = self._failures.values()
                raise GenerationError(message, self._completions, sorted(self._failures))
        finally:
            for request in self._running.values():
                self._engine.cancel(request)
        return self._completions

    def _submit(self) -> None:
        """Submit as many as the engine takes now."""
        while self._waiting:
            index = self._waiting[0]
            try:
                self._running[index] = self._jobs[index].submit(self._engine, partial(self._deliver, index))
            except QueueFullError:
                return
            except EngineDeadError as error:
                if len(self._waiting) == len(self._jobs):
                    raise  # before the batch: there is nothing to lose
                self._fail(index, str(error))
            self._waiting.popleft()

    def _deliver(self, index: int, output: Output) -> None:
        self._outputs.put((index, output))

    def _receive(self) -> None:
        """Wait for an output; not for ever while jobs are left, since others may have filled the queue."""
        try:
            index, output = self._outputs.get(timeout=_BUSY_SECONDS if self._waiting else None)
        except queue.Empty:
            return
        if index not in self._running:
            return
        try:
            piece = self._jobs[index].read(output)
        except GenerationError as error:
            piece = self._fail(index, str(error))
        else:
            self._completions[index].add(piece)
        if piece.finish_reason is not None:
            request = self._running.pop(index)
            self._completions[index].prompt_logprobs = request.prompt_logprobs
            if output.finish_reason is None:  # its turn has ended before the engine knows
                self._engine.cancel(request)

    def _fail(self, index: int, message: str) -> Piece:
        """Note that a prompt has failed; what that adds to its completion."""
        self._failures[index] = message
        piece = Piece((), (), (), FinishReason.ERROR)
        self._completions[index].add(piece)
        return piece


def _is_conversation(given: Prompt | Conversation | Sequence[Conversation]) -> TypeIs[Conversation]:
    return not isinstance(given, str) and len(given) > 0 and isinstance(given[0], Mapping)


def _is_prompt(given: Prompt | Sequence[Prompt]) -> TypeIs[Prompt]:
    return isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))


def _spread(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each")
    return params
