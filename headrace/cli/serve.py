"""`headrace serve`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from headrace.cli import console
from headrace.cli.options import EngineFlags, ModelFlags

if TYPE_CHECKING:
    from headrace.server import ServerOptions


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """Where the endpoint is, and the model's name there."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets in everyone who can reach the machine.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000
    served_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What clients call the model. Default: its own name.", show_default=False
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="HEADRACE_API_KEY",
            help="Key that clients must send; give the option again for each further key.",
            show_default=False,
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help='Page that may call the endpoint from a browser, such as http://localhost:3000; "*": all.',
            show_default=False,
        ),
    ] = None
    keep_alive: Annotated[
        float, typer.Option(help="Seconds of silence after which a stream gets a comment line; 0: never.")
    ] = 15.0
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Log how prompts are fitted in between the steps of answers, too."),
    ] = False

    def options(self) -> ServerOptions:
        from headrace.server import ServerOptions

        return ServerOptions(
            host=self.host,
            port=self.port,
            served_name=self.served_name,
            api_keys=tuple(self.api_key or ()),
            cors_origins=tuple(self.cors_origin or ()),
            keep_alive=self.keep_alive,
        )


def serve(model: ModelFlags, engine: EngineFlags, listen: ListenFlags) -> None:
    """Serve a model behind an endpoint that speaks the protocols of OpenAI and Anthropic.

    It answers POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, streaming or not,
    GET /v1/models, /health, /ready and /metrics. A line for each request goes to stderr. Ctrl-C stops it,
    after answers under way have had a few seconds to end.

    Example: headrace serve smollm2 --port 8000
    """
    from headrace.engine.interpreter import settled_interpreter
    from headrace.server import bind, create_app, run

    options = engine.options()
    server_options = listen.options()
    with contextlib.closing(bind(server_options)) as socket:
        loaded = model.load(options)
        console.configure_server_logging(debug=listen.verbose)
        with contextlib.closing(engine.build(loaded, options, rehearse=True)) as core:
            app = create_app(loaded, core, server_options)
            name = listen.served_name or loaded.name
            with settled_interpreter():
                run(app, socket, on_ready=lambda url: _announce(name, url, core.max_context))


def _announce(name: str, url: str, context: int) -> None:
    console.err.print(
        f"Serving [bold]{escape(name)}[/] at [bold]{url}/v1[/], context {context:,} tokens. Ctrl-C stops it.",
        soft_wrap=True,
    )
