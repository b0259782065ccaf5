"""`headrace generate`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Annotated

import typer

from headrace.cli import console
from headrace.cli.options import EngineFlags, ModelFlags, SamplingFlags


def generate(
    model: ModelFlags,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; read from standard input if left out.", show_default=False
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user's message, by the chat template.")
    ] = False,
    *,
    sampling: SamplingFlags,
    engine: EngineFlags,
) -> None:
    """Continue one prompt, streamed to standard output.

    With --synthetic the only argument is the prompt.

    Example: headrace generate smollm2 "The capital of France is" --temperature 0
    """
    from headrace.llm import LLM

    if model.synthetic is not None and prompt is None:
        model, prompt = _without_model(model), model.model
    options = engine.options()
    sampling.params()  # a mistake should show before the load
    text = _read() if prompt is None else prompt
    if not text:
        raise console.RefusedError("the prompt is empty: give it as an argument or on standard input")
    loaded = model.load(options)
    with LLM.over(loaded, engine.build(loaded, options)) as llm:
        params = sampling.params(loaded.sampling)
        start, tokens = time.monotonic(), 0
        for piece in llm.stream([{"role": "user", "content": text}] if chat else text, params):
            tokens += len(piece.token_ids)
            if piece.reasoning:  # not a part of the answer
                console.err.print(piece.reasoning, end="", markup=False, soft_wrap=True, style="dim")
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        console.say_rate(tokens, time.monotonic() - start)


def _read() -> str:
    """What stands on standard input. Raises RefusedError if that is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise console.RefusedError(f"standard input is no text: {error}") from error


def _without_model(model: ModelFlags) -> ModelFlags:
    return replace(model, model=None)
