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
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import FinishReason, Output, QueueFullError, Request
from headrace.load import Loaded, load
from headrace.model.progress import Progress
from headrace.model.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # of typing from Python 3.13 on

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_BUSY_SECONDS = 0.05  # how long to wait when others have filled the queue


class GenerationError(RuntimeError):
    """The engine failed while it worked on a prompt; the message says how."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one prompt and its continuation."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Completion:
    """What the model made of one prompt. `logprobs` and `prompt_logprobs` are empty unless asked for."""

    usage: Usage
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason or ""
        self.usage = Usage(self.usage.prompt_tokens, len(self.token_ids))


class LLM:
    """A loaded model and its engine, on a thread of its own until `close`.

    `source` is a Hugging Face folder, a .gguf file, or a built-in name such as "smollm2"; or None with
    `synthetic` naming a geometry to fill with random weights. `options` are the fields of EngineOptions.
    `sampling` is what holds for a prompt without parameters: what the checkpoint's generation_config.json
    asks for, unless `generation_config` is "none".

    Raises SourceError, CheckpointError or OptionError, whose message says what to change.
    """

    def __init__(
        self,
        source: str | None = None,
        *,
        synthetic: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        generation_config: str = "model",
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
            progress=progress,
        )
        engine = AsyncEngine(
            build_engine(loaded.model, loaded.tokenizer, engine_options, weights=loaded.weights)
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
        self._engine = engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue each prompt: text or token ids, one or a list of them. One completion each, in order.

        `params` are for all prompts, or a list with one for each.

        Raises EngineError for a prompt that the engine cannot take, GenerationError if it fails.
        """
        listed = [prompts] if _is_prompt(prompts) else prompts
        return self._run([self._tokens(prompt) for prompt in listed], params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **variables: Any,
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of them. `variables` reach the chat template.

        Raises ChatTemplateError besides what `generate` raises.
        """
        conversations = [messages] if _is_conversation(messages) else messages
        prompts = [self.tokenizer.apply_chat_template(each, **variables) for each in conversations]
        return self._run(prompts, params)

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> Generator[Output, None, None]:
        """The outputs for one prompt or conversation as they are made; leaving the iteration cancels it.

        The request is queued at the first `next`, which raises what `generate` would.
        """
        if _is_conversation(prompt):
            tokens = self.tokenizer.apply_chat_template(prompt, **variables)
        else:
            tokens = self._tokens(prompt)
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        request = self._engine.submit(tokens, params or self.sampling, outputs.put)
        try:
            while True:
                output = _checked(outputs.get())
                yield output
                if output.finish_reason is not None:
                    return
        finally:
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

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        return _Batch(self._engine, prompts, _spread(params or self.sampling, len(prompts))).run()


class _Batch:
    """Prompts on their way through the engine, with no more of them queued than its queue holds."""

    def __init__(
        self, engine: AsyncEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> None:
        self._engine = engine
        self._jobs = collections.deque(enumerate(zip(prompts, params, strict=True)))
        self._completions = [Completion(Usage(len(prompt), 0)) for prompt in prompts]
        self._outputs: queue.SimpleQueue[tuple[int, Output]] = queue.SimpleQueue()
        self._running: dict[int, Request] = {}

    def run(self) -> list[Completion]:
        try:
            while self._jobs or self._running:
                self._submit()
                self._receive()
        finally:
            for request in self._running.values():
                self._engine.cancel(request)
        return self._completions

    def _submit(self) -> None:
        """Submit as many as the engine takes now."""
        while self._jobs:
            index, (prompt, params) = self._jobs[0]
            try:
                request = self._engine.submit(prompt, params, partial(self._deliver, index))
            except QueueFullError:
                return
            self._running[index] = request
            self._jobs.popleft()

    def _deliver(self, index: int, output: Output) -> None:
        self._outputs.put((index, output))

    def _receive(self) -> None:
        """Wait for an output; not for ever while jobs are left, since others may have filled the queue."""
        try:
            index, output = self._outputs.get(timeout=_BUSY_SECONDS if self._jobs else None)
        except queue.Empty:
            return
        if output.finish_reason is not None:
            self._completions[index].prompt_logprobs = self._running.pop(index).prompt_logprobs
        self._completions[index].add(_checked(output))


def _checked(output: Output) -> Output:
    if output.finish_reason is FinishReason.ERROR:
        raise GenerationError(output.error or "the engine failed")
    return output


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
