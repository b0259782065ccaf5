"""`headrace chat`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import console
from headrace.cli.options import EngineFlags, ModelFlags, SamplingFlags
from headrace.client import Client, Piece

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.model.sampling import SamplingParams

Messages = list[dict[str, Any]]
Answer = Callable[[Messages], Generator[Piece, None, None]]
"""What answers a conversation, piece by piece; closing the iterator cancels the answer."""

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def chat(
    model: ModelFlags,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to a server that runs already in place of loading a MODEL.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message to begin with.", show_default=False)
    ] = None,
    *,
    sampling: SamplingFlags,
    engine: EngineFlags,
) -> None:
    """Chat with a model in the terminal.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    Example: headrace chat smollm2 --system "You are terse."
    """
    if url is not None and (model.model or model.synthetic):
        raise console.RefusedError("give either a model to load or the --url of a server, not both")
    answering = _remote(url, sampling) if url is not None else _local(model, engine, sampling)
    with answering as answer:
        _converse(answer, [{"role": "system", "content": system}] if system else [])


@contextlib.contextmanager
def _remote(url: str, sampling: SamplingFlags) -> Iterator[Answer]:
    try:
        client = Client(url)
    except ValueError as error:
        raise console.RefusedError(str(error)) from error
    name = client.model()
    console.err.print(f"[dim]{name} at {url}. {_HELP}.[/]")
    yield lambda messages: client.chat(messages, model=name, **sampling.values())


@contextlib.contextmanager
def _local(model: ModelFlags, engine: EngineFlags, sampling: SamplingFlags) -> Iterator[Answer]:
    from headrace.llm import LLM

    options = engine.options()
    sampling.params()  # a mistake should show before the load
    loaded = model.load(options)
    with LLM.over(loaded, engine.build(loaded, options)) as llm:
        params = sampling.params(loaded.sampling)
        console.err.print(f"[dim]{loaded.name}. {_HELP}.[/]")
        yield lambda messages: _pieces(llm, messages, params)


def _pieces(llm: LLM, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
    tokens = 0
    for output in llm.stream(messages, params):
        tokens += len(output.token_ids)
        if output.text:
            yield Piece(output.text)
        if output.finish_reason is not None:
            yield Piece("", output.finish_reason, tokens)


def _converse(answer: Answer, opening: Messages) -> None:
    """Read what the user says and answer it, until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history in input()
    messages = list(opening)
    while (line := _read()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            console.err.print("[dim]The conversation is forgotten.[/]")
        elif line.startswith("/"):
            console.err.print(f"[dim]{_HELP}.[/]")
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _speak(answer, messages)})


def _read() -> str | None:
    """A line from the user, or None at the end of input."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        console.out.print()
        return None


def _speak(answer: Answer, messages: Messages) -> str:
    """Print the answer as it comes. What there was of one that the user stopped counts as the answer."""
    said: list[str] = []
    start = time.monotonic()
    with contextlib.closing(answer(messages)) as pieces:
        try:
            for piece in pieces:
                said.append(piece.text)
                console.out.print(piece.text, end="", markup=False, soft_wrap=True)
                if piece.completion_tokens is not None:
                    console.out.print()
                    console.say_rate(piece.completion_tokens, time.monotonic() - start)
        except KeyboardInterrupt:
            console.out.print()
            console.err.print("[dim]Stopped.[/]")
    return "".join(said)
