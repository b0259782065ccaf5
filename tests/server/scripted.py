"""A served engine whose model is a script: the whole path from HTTP to the scheduler, with known content.

What the backend says depends on words in the prompt, so that a test can ask for what it needs:

    "say {...}"   says what stands between the braces
    "endless"     says "a" until it is stopped, slowly, and ever more slowly
    "no end"      says "a" until it is stopped, fast
    "seed"        says the request's seed
    "spoilt"      says "a" twice and then gives no numbers
    "crash"       the backend raises, which ends the engine
    otherwise     says REPLY

All of this is the answer's words: in a chat the backend writes North's markers around them. Anything else it
says word for word, when a test has told it so by `says` or `begins`.
"""

from __future__ import annotations

import collections
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.build import assemble_engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import Request
from headrace.load import Loaded
from headrace.model import markers
from headrace.model.batch import Span
from headrace.model.config import DenseMLP, KVGroup, LayerConfig, ModelConfig, Norm, Rope
from headrace.model.constraint import forbidden
from headrace.model.kv import blocks_for
from headrace.model.sampler import NO_TOKEN, Sampled
from headrace.model.sampling import TokenLogprobs
from headrace.model.tokenizer import Tokenizer
from headrace.server.app import Server, ServerOptions, bind, create_app
from tests.waiting import WAIT, comes, until

REPLY = "Hello there."
TURN_TOKENS = 4  # what a chat's answer costs besides its words: three markers, and the end of the turn
CONTEXT = 2048
VOCABULARY = 512
STEP_SECONDS = 0.0005  # long enough for other threads to act between two steps
SLOW_STEP_SECONDS = 0.01  # at the beginning of an endless answer
SLOWER_TOKENS = 200  # after which its steps take twice as long: the whole context takes half an hour


class ScriptedBackend:
    """Prefills nothing and decodes the script; counts its steps."""

    name = "scripted"
    takes_constraints = True
    max_rows = 16
    max_steps = 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.steps = 0
        self.closed = False
        # What the next requests get, and whether their answers stay open after it.
        self._lines: collections.deque[tuple[str, bool]] = collections.deque()
        self._taken: dict[int, Sequence[int]] = {}
        self._open: set[int] = set()  # the prompts whose answers stay open
        self._tokenizer = tokenizer
        self._endless = tokenizer.encode("a") * CONTEXT
        self._spoilt = tokenizer.encode("a") * CONTEXT
        self._end = tokenizer.eos_token_ids[0]

    def says(self, *lines: str) -> None:
        """What the next requests get, word for word."""
        self._lines.extend((line, False) for line in lines)

    def begins(self, line: str) -> None:
        """What the next request gets; after it the answer stays open until somebody stops it."""
        self._lines.append((line, True))

    def prepare(self) -> None:
        pass

    def prefill(self, chunks: Sequence[Span]) -> None:
        pass

    def score(self, chunk: Span, following: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Every token of a prompt is as likely as its place is early."""
        return [
            TokenLogprobs(token, -0.125 * (chunk.start + place), tuple((300 + i, -9.0) for i in range(count)))
            for place, token in enumerate(following, start=1)
        ]

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        live = [True] * len(rows)
        scripts = [self._script(row) for row in rows]
        for step in range(steps):
            speak = [live[i] and not self._is_silent(row, scripts[i]) for i, row in enumerate(rows)]
            if not any(speak):
                while all(live) and not (interrupt.is_set() or self.closed):
                    time.sleep(STEP_SECONDS)
                return
            time.sleep(max(map(self._step_seconds, rows, scripts)))
            self.steps += 1
            made: list[Sampled | None] = [None] * len(rows)
            for i, row in enumerate(rows):
                if speak[i]:
                    made[i] = self._sampled(row, scripts[i])
                    live[i] = not row.ends(cast(Sampled, made[i]).token, step + 1)
            yield made
            if not any(live) or interrupt.is_set():
                return

    def _is_silent(self, row: DecodeRow, script: Sequence[int]) -> bool:
        """Whether an answer that stays open has said all that it has to say."""
        return id(row.prompt) in self._open and len(row.output) >= len(script)

    def _step_seconds(self, row: DecodeRow, script: Sequence[int]) -> float:
        if script is not self._endless:
            return STEP_SECONDS
        return float(SLOW_STEP_SECONDS * 2 ** (len(row.output) // SLOWER_TOKENS))

    def _script(self, row: DecodeRow) -> Sequence[int]:
        """The tokens of the whole reply, without the end of the turn."""
        if id(row.prompt) not in self._taken and self._lines:
            line, stays_open = self._lines.popleft()
            self._taken[id(row.prompt)] = self._encode(line)
            if stays_open:
                self._open.add(id(row.prompt))
        if (taken := self._taken.get(id(row.prompt))) is not None:
            return taken
        prompt = self._tokenizer.decode(row.prompt)
        if "crash" in prompt:
            raise RuntimeError("the script says so")
        if "spoilt" in prompt:
            return self._spoilt
        if "endless" in prompt:
            return self._endless
        if "no end" in prompt:
            return list(self._endless)
        if said := re.search(r"say \{(.*?)\}", prompt, re.DOTALL):
            return self._in_turn(row, said[1])
        return self._in_turn(row, f"{row.seed}" if "seed" in prompt else REPLY)

    def _in_turn(self, row: DecodeRow, words: str) -> Sequence[int]:
        """The words as the prompt wants them continued."""
        last = self._tokenizer.token_text(row.prompt[-1])
        if last == markers.START_THINKING:
            words = markers.END_THINKING + markers.START_TEXT + words + markers.END_TEXT
        elif last == markers.END_THINKING:
            words = markers.START_TEXT + words + markers.END_TEXT
        return self._encode(words)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _sampled(self, row: DecodeRow, script: Sequence[int]) -> Sampled:
        position = len(row.output)
        if script is self._spoilt and position == 2:
            return Sampled(NO_TOKEN)
        token = script[position] if position < len(script) else self._end
        mask = None if row.constraint is None else row.constraint.mask()
        if mask is not None and (banned := forbidden(mask, self._tokenizer.vocab_size))[token]:
            token = int(banned.logical_not().nonzero()[0])  # the first of those that may come
        wanted = row.params.logprobs
        if wanted is None:
            return Sampled(token)
        return Sampled(token, TokenLogprobs(token, -0.5, tuple((300 + i, -1.0 - i) for i in range(wanted))))


class WatchedEngine(AsyncEngine):
    """Remembers what was submitted, and after which step something had been cancelled."""

    backend: ScriptedBackend

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.submitted: list[Request] = []
        self.cancelled_at: dict[Request, int] = {}

    def submit(self, *args: Any, **options: Any) -> Request:
        request = super().submit(*args, **options)
        self.submitted.append(request)
        return request

    def close(self) -> None:
        self.backend.closed = True  # answers that stay open would keep it at work
        super().close()

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self.cancelled_at.setdefault(request, self.backend.steps)


@dataclass
class Scripted:
    """A running server over the script."""

    url: str
    tokenizer: Tokenizer
    engine: WatchedEngine
    backend: ScriptedBackend

    def says(self, *lines: str) -> None:
        """What the next requests get, word for word."""
        self.backend.says(*lines)

    def begins(self, line: str) -> None:
        """What the next request gets; after it the answer stays open until somebody stops it."""
        self.backend.begins(line)

    @property
    def prompt(self) -> str:
        """The last prompt, as the model reads it."""
        return self.tokenizer.decode(self.engine.submitted[-1].prompt, skip_special_tokens=False)

    def wait_idle(self, seconds: float = WAIT) -> None:
        """Wait until the engine holds no request and every block is free; AssertionError if it never is."""
        assert comes(self._idle, seconds), f"still busy: {self.engine.state}"

    def wait_busy(self, *, running: int, waiting: int = 0) -> None:
        def busy() -> bool:
            state = self.engine.state
            return state.running >= running and state.waiting >= waiting

        assert comes(busy), f"never that busy: {self.engine.state}"

    def wait_tokens(self, number: int) -> None:
        """Wait until the first token of a request is on its way to its client: there is a second one by then.

        `number` is how many had been submitted before it.
        """
        submitted = self.engine.submitted
        until(lambda: len(submitted) > number and len(submitted[number].output) > 1)

    def wait_none_waiting(self) -> None:
        """What was taken back is gone with the engine's next step."""
        assert comes(lambda: self.engine.state.waiting == 0), f"some wait: {self.engine.state}"

    def _idle(self) -> bool:
        state = self.engine.state
        return state.running == state.waiting == 0 and state.free_blocks == {"full": _blocks()}


def _blocks() -> int:
    return 16 * blocks_for(CONTEXT)


def config(vocab_size: int = VOCABULARY) -> ModelConfig:
    layer = LayerConfig(window=None, rope=Rope.HALF_SPLIT, mlp=DenseMLP(width=8))
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        layers=(layer,),
        parallel_block=False,
        norm=Norm.RMS,
        norm_eps=1e-6,
        rope_theta=10000.0,
        max_positions=CONTEXT,
        tied_head=True,
    )


def scripted_engine(tokenizer: Tokenizer, **options: Any) -> WatchedEngine:
    """A running engine over the script."""
    backend = ScriptedBackend(tokenizer)
    core = assemble_engine(
        backend=backend,
        prefiller=backend,
        tokenizer=tokenizer,
        config=config(tokenizer.vocab_size),
        sizes={KVGroup.FULL: _blocks()},
        max_context=CONTEXT,
        # Without the prefix cache every block is free when nothing runs, which shows what leaks.
        options=EngineOptions(**{"prefix_cache": False} | options),
    )
    engine = WatchedEngine(core)
    engine.backend = backend
    engine.start()
    return engine


@contextmanager
def scripted_server(
    tokenizer: Tokenizer | None = None,
    served: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Scripted]:
    """A server on a free port; `served` are ServerOptions', `options` EngineOptions'.

    `sampling` is what the checkpoint asks for.
    """
    tokenizer = tokenizer or Tokenizer.synthetic(VOCABULARY)
    engine = scripted_engine(tokenizer, **options)
    model = SimpleNamespace(config=config(tokenizer.vocab_size))
    loaded = Loaded("scripted", cast(Any, model), tokenizer, sampling=sampling or {})
    try:
        with serving(loaded, engine, **served or {}) as url:
            yield Scripted(url, tokenizer, engine, engine.backend)
    finally:
        engine.close()


@contextmanager
def serving(loaded: Loaded, engine: AsyncEngine, **served: Any) -> Iterator[str]:
    """The real application on a thread; gives its URL."""
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    options = ServerOptions(port=0, **served)
    bound = bind(options)
    server = Server(create_app(loaded, engine, options), on_ready)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
    thread.start()
    try:
        assert ready.wait(WAIT), "the server did not start"
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join(WAIT)
        bound.close()
