"""The HTTP server: its parts put together, and run."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from headrace import __version__
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.options import OptionError
from headrace.server import (
    anthropic,
    chat,
    completions,
    errors,
    health,
    metrics,
    models,
    page,
    responses,
    tokens,
)
from headrace.server.failures import Failures
from headrace.server.formats import choose_format
from headrace.server.gate import Gate
from headrace.server.metrics import Metrics
from headrace.server.request_log import ID_HEADER, RequestLog
from headrace.server.state import ServerState
from headrace.server.structure import Grammars

if TYPE_CHECKING:
    from headrace.load import Loaded

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5  # what answers under way get before they are cut off


class AddressError(ValueError):
    """An address that cannot be listened on; the message says what to give instead."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the endpoint is served.

    host, port   where to listen
    served_name  what to call the model; None: the name that it was loaded under
    keep_alive   seconds of silence after which a stream gets a comment line; 0: never
    api_keys     of which a client must send one; none: everyone may come in
    cors_origins pages that may call the endpoint from a browser; "*" for all
    max_body     bytes that a request's body may have

    Raises OptionError for a value that no server could keep to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    keep_alive: float = 15.0
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_body: int = 64 * 2**20

    def __post_init__(self) -> None:
        if not self.keep_alive >= 0:
            raise OptionError("keep_alive", f"is {self.keep_alive}; give seconds, or 0 for never")
        if not all(self.api_keys):  # nobody's key is empty, and everyone can send that
            raise OptionError("api_key", "is empty; give a key, or leave the option out to let everyone in")


def create_app(loaded: Loaded, engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """The application. It borrows `engine`: starting and closing it is the caller's."""
    vocab_size = loaded.model.config.vocab_size
    chat_format = choose_format(loaded.tokenizer)
    model_name = options.served_name or loaded.name
    state = ServerState(
        model_name=model_name,
        vocab_size=vocab_size,
        tokenizer=loaded.tokenizer,
        engine=engine,
        format=chat_format,
        grammars=Grammars(loaded.tokenizer, chat_format, vocab_size=vocab_size),
        sampling=loaded.sampling,
        metrics=Metrics(engine, model_name=model_name),
        keep_alive=options.keep_alive,
    )
    app = FastAPI(title="headrace", version=__version__)
    errors.install(app)
    for module in (chat, completions, anthropic, responses, models, tokens, health):
        app.include_router(module.router(state))
    app.include_router(metrics.router(state.metrics))
    app.include_router(page.router())
    app.add_middleware(Gate, api_keys=options.api_keys, max_body=options.max_body)
    app.add_middleware(Failures)
    app.add_middleware(RequestLog, metrics=state.metrics)  # it sees what the gate refuses
    if options.cors_origins:  # outermost: a refusal must be readable for the page too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", ID_HEADER],  # a page sees no others of ours
        )
    return app


def bind(options: ServerOptions) -> socket.socket:
    """A socket at the address, before the model is loaded: a taken port should not cost minutes to find out.

    Nobody can connect until `run` listens on it. Raises AddressError.
    """
    if not 0 <= options.port <= 65535:
        raise AddressError(
            f"port {options.port} does not exist: give one from 1 to 65535, or 0 for any free one"
        )
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise AddressError(
            f"cannot listen on {options.host}, port {options.port} ({error.strerror}): "
            "give another --port or --host"
        ) from error
    if bound.getsockname()[0] in ("0.0.0.0", "::") and not options.api_keys:
        log.warning(
            "Listening on all interfaces (%s), without authentication: everyone who can reach this machine "
            "can use the model. --host 127.0.0.1 keeps it to this machine, --api-key asks for a key.",
            options.host,
        )
    return bound


class Server(uvicorn.Server):
    """uvicorn, which also says when it listens, and where: the port may have been 0, for any free one."""

    def __init__(self, app: FastAPI, on_ready: Callable[[str], None]) -> None:
        # log_config None: who runs the server has set up logging.
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",  # there is none, and a task that waits for its end would be one to cut off
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")


def run(app: FastAPI, bound: socket.socket, *, on_ready: Callable[[str], None]) -> None:
    """Serve on a socket from `bind` until SIGINT or SIGTERM. `on_ready` gets the URL once it listens.

    uvicorn raises the signal that ended it once more when it has shut down; here that is the ordinary end.
    """
    terminate = signal.signal(signal.SIGTERM, _interrupt)
    try:
        Server(app, on_ready).run(sockets=[bound])
    except KeyboardInterrupt:
        log.debug("stopped by a signal")
    finally:
        signal.signal(signal.SIGTERM, terminate)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
