"""The command `headrace`: one module for each of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace import __version__
from headrace.cli.bench import bench_app
from headrace.cli.chat import chat
from headrace.cli.check import check
from headrace.cli.console import out
from headrace.cli.generate import generate
from headrace.cli.info import info
from headrace.cli.options import command
from headrace.cli.plan import plan_app
from headrace.cli.serve import serve
from headrace.cli.trace import trace

app = typer.Typer(
    name="headrace",
    help="A serving engine for North Mini Code on Hopper GPUs; smaller models and CPUs for trying it out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for each in (serve, chat, generate, info, check, trace):
    command(app)(each)
app.add_typer(plan_app, name="plan")
app.add_typer(bench_app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            is_eager=True,
            callback=_print_version,
            show_default=False,
        ),
    ] = False,
) -> None:
    """What comes before a command."""


def main() -> None:
    """What the console script calls."""
    app()
