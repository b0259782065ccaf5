"""`headrace chat`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headrace.cli import console
from headrace.cli.options import EngineFlags, ModelFlags, SamplingFlags
from headrace.client import Client, Piece, ServerError, call_text

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.model.sampling import SamplingParams
    from headrace.server.formats import Event

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
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="HEADRACE_API_KEY",
            help="Key for the server at --url, if it asks for one.",
            show_default=False,
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
    answering = _remote(url, api_key, sampling) if url is not None else _local(model, engine, sampling)
    with answering as answer:
        _converse(answer, [{"role": "system", "content": system}] if system else [])


@contextlib.contextmanager
def _remote(url: str, api_key: str | None, sampling: SamplingFlags) -> Iterator[Answer]:
    keys = (api_key or "").split()  # the environment may have those of a server, of which any will do
    try:
        client = Client(url, api_key=keys[0] if keys else None)
    except ValueError as error:
        raise console.RefusedError(str(error)) from error
    name = _model_of(client)
    console.err.print(f"[dim]{escape(name)} at {escape(url)}. {_HELP}.[/]", soft_wrap=True)
    fields = sampling.over(client.default_sampling())
    yield lambda messages: client.chat(messages, model=name, **fields)


def _model_of(client: Client) -> str:
    try:
        return client.model()
    except ServerError as error:
        if error.status == HTTPStatus.UNAUTHORIZED:
            raise console.RefusedError(
                f"{client.url} asks for a key: give it with --api-key ({error})"
            ) from error
        raise


@contextlib.contextmanager
def _local(model: ModelFlags, engine: EngineFlags, sampling: SamplingFlags) -> Iterator[Answer]:
    from headrace.llm import LLM

    options = engine.options()
    sampling.params()  # a mistake should show before the load
    loaded = model.load(options)
    with LLM.over(loaded, engine.build(loaded, options)) as llm:
        params = sampling.params(loaded.sampling)
        console.err.print(f"[dim]{escape(loaded.name)}. {_HELP}.[/]", soft_wrap=True)
        yield lambda messages: _pieces(llm, messages, params)


def _pieces(llm: LLM, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
    tokens = 0
    for made in llm.stream(messages, params):
        tokens += len(made.token_ids)
        for event in made.events:
            yield _piece(event)
        if made.finish_reason is not None:
            yield Piece("", made.finish_reason, tokens)


def _piece(event: Event) -> Piece:
    from headrace.server.formats import CallArguments, CallEnd, CallStart, Content, Reasoning

    match event:
        case Content(text):
            return Piece(text)
        case Reasoning(text):
            return Piece(reasoning=text)
        case CallStart(_, name):
            return Piece(call=call_text(name, None))
        case CallArguments(_, text):
            return Piece(call=text)
        case CallEnd():
            return Piece()


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
            messages.append(_speak(answer, messages))


def _read() -> str | None:
    """A line from the user, or None at the end of input."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        console.out.print()
        return None


def _speak(answer: Answer, messages: Messages) -> dict[str, Any]:
    """Print the answer as it comes, thoughts and calls dimmed and apart from what is said; the answer as a
    message. What there was of one that the user stopped counts as the answer.
    """
    told = _Told()
    tokens: int | None = None
    start = time.monotonic()
    with contextlib.closing(answer(messages)) as pieces:
        try:
            for piece in pieces:
                told.add(piece)
                tokens = piece.completion_tokens
            console.out.print()
            if tokens is not None:
                console.say_rate(tokens, time.monotonic() - start)
        except KeyboardInterrupt:
            console.out.print()
            console.err.print("[dim]Stopped.[/]")
    return told.message


class _Told:
    """What has been printed of an answer."""

    def __init__(self) -> None:
        self._parts = {"reasoning": "", "text": "", "call": ""}
        self._last = ""

    def add(self, piece: Piece) -> None:
        for kind in self._parts:
            if text := getattr(piece, kind):
                self._begin(kind, text)
                self._parts[kind] += text
                style = None if kind == "text" else "dim"
                console.out.print(text, end="", markup=False, soft_wrap=True, style=style)

    def _begin(self, kind: str, text: str) -> None:
        """A line's end between thoughts, words and calls."""
        if self._last not in ("", kind) and not text.startswith("\n"):
            console.out.print()
        self._last = kind

    @property
    def message(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._parts["text"]}
        return message | ({"reasoning": reasoning} if (reasoning := self._parts["reasoning"]) else {})
