"""The real server over the script, on a thread, with every request written down."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.backend import DecodeRow, Interrupt
from headrace.engine.build import assemble_engine
from headrace.engine.options import EngineOptions
from headrace.engine.request import Request
from headrace.load import Loaded, resolve
from headrace.model.batch import Span
from headrace.model.config import KVGroup
from headrace.model.constraint import forbidden
from headrace.model.kv import blocks_for
from headrace.model.presets import PRESETS
from headrace.model.sampler import Sampled
from headrace.model.sampling import TokenLogprobs
from headrace.model.tokenizer import Tokenizer
from headrace.server.app import Server, ServerOptions, bind, create_app
from tools.clients.script import answer

MODEL = "North-Mini-Code-1.0"
CONTEXT = 2**18
POOL_TOKENS = 2**20
Script = Callable[[str], str]
_ENDINGS = ('"', "}", '"}', "]")  # what brings JSON to its end, where a grammar forbids what the script says


class ScriptBackend:
    """Computes nothing; gives the tokens of the script's answer to each prompt."""

    name = "script"
    takes_constraints = True
    max_rows = 16
    max_steps = 16

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer = tokenizer
        self._say = script
        self._end = tokenizer.eos_token_ids[0]
        self._scripts: dict[int, tuple[Sequence[int], list[int]]] = {}  # by slot: the prompt, and the answer
        self._endings = [
            token for text in _ENDINGS if len(tokens := self._encode(text)) == 1 for token in tokens
        ]

    def prepare(self) -> None:
        pass

    def prefill(self, chunks: Sequence[Span]) -> None:
        pass

    def run(
        self, rows: Sequence[DecodeRow], steps: int, interrupt: Interrupt
    ) -> Iterator[Sequence[Sampled | None]]:
        live = [True] * len(rows)
        for step in range(steps):
            made: list[Sampled | None] = [None] * len(rows)
            for index, row in enumerate(rows):
                if live[index]:
                    token = self._token(row)
                    logprobs = None if row.params.logprobs is None else TokenLogprobs(token, 0.0, ())
                    made[index] = Sampled(token, logprobs)
                    live[index] = not row.ends(token, step + 1)
            yield made
            if not any(live) or interrupt.is_set():
                return

    def _token(self, row: DecodeRow) -> int:
        script = self._script(row)
        position = len(row.output)
        token = script[position] if position < len(script) else self._end
        mask = None if row.constraint is None else row.constraint.mask()
        if mask is None:
            return token
        banned = forbidden(mask, self._tokenizer.vocab_size)
        wanted = [token, self._end, *self._endings]
        allowed = [choice for choice in wanted if not banned[choice]]
        return allowed[0] if allowed else int(banned.logical_not().nonzero()[0])

    def _script(self, row: DecodeRow) -> list[int]:
        prompt, script = self._scripts.get(row.slot, ((), []))
        if prompt is not row.prompt:
            text = self._tokenizer.decode(row.prompt, skip_special_tokens=False)
            script = self._encode(self._say(text))
            self._scripts[row.slot] = (row.prompt, script)
        return script

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


@dataclass(slots=True)
class Exchange:
    """One HTTP request and what became of it; the bodies are complete."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    reply: bytes = b""

    def json(self) -> Any:
        """The request's body, None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Recorder:
    """ASGI middleware that appends every request to `exchanges` when it arrives."""

    def __init__(self, app: ASGIApp, exchanges: list[Exchange]) -> None:
        self._app = app
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        exchange = Exchange(scope["method"], scope["path"] + (f"?{query}" if query else ""), headers)
        self._exchanges.append(exchange)

        async def heard() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def said(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.reply += message.get("body", b"")
            await send(message)

        await self._app(scope, heard, said)


class RecordingEngine(AsyncEngine):
    """Remembers what was submitted."""

    requests: list[Request]

    def submit(self, *arguments: Any, **options: Any) -> Request:
        request = super().submit(*arguments, **options)
        self.requests.append(request)
        return request


@dataclass
class Served:
    """The running server: its address, and what it was asked."""

    url: str
    tokenizer: Tokenizer
    exchanges: list[Exchange] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


@contextmanager
def served(*, port: int = 0, script: Script = answer, api_keys: Sequence[str] = ()) -> Iterator[Served]:
    """The server over `script`, which is given a prompt and says the model's turn.

    It has north-micro's tokenizer and template, and North's layers and window.
    """
    tokenizer = Tokenizer.from_pretrained(resolve("north-micro"))
    config = dataclasses.replace(PRESETS["north-mini-code"], vocab_size=tokenizer.vocab_size)
    backend = ScriptBackend(tokenizer, script)
    core = assemble_engine(
        backend=backend,
        prefiller=backend,
        tokenizer=tokenizer,
        config=config,
        sizes=dict.fromkeys(KVGroup, blocks_for(POOL_TOKENS)),
        max_context=CONTEXT,
        options=EngineOptions(),
    )
    engine = RecordingEngine(core)
    result = Served("", tokenizer)
    engine.requests = result.requests
    loaded = Loaded(MODEL, cast(Any, SimpleNamespace(config=config)), tokenizer)
    options = ServerOptions(port=port, api_keys=api_keys)
    app = create_app(loaded, engine, options)
    app.add_middleware(Recorder, exchanges=result.exchanges)
    ready = threading.Event()

    def on_ready(url: str) -> None:
        result.url = url
        ready.set()

    bound = bind(options)
    server = Server(app, on_ready)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
    engine.start()
    thread.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the server did not start within a minute")
        yield result
    finally:
        server.should_exit = True
        thread.join(15)
        bound.close()
        engine.close()
