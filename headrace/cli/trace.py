"""`headrace trace`: what every SM does when, as the decode kernel itself records it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import console


def trace(
    file: Annotated[
        Path | None, typer.Argument(help="Where the trace goes, for ui.perfetto.dev.", show_default=False)
    ] = None,
    point: Annotated[
        str, typer.Option(metavar="ROWSxCONTEXT", help="What to run, such as 4x8K or 8x1K..64K.")
    ] = "1x8K",
    synthetic: Annotated[
        str, typer.Option(metavar="NAME", help="The model whose sizes are meant.")
    ] = "north-mini-code",
    steps: Annotated[int, typer.Option(min=2, max=16, help="Steps of the launch.")] = 8,
    shown: Annotated[int, typer.Option(min=1, help="How many of them, the last ones, go to the file.")] = 1,
    image: Annotated[
        Path | None, typer.Option(help="Where a picture of the last step goes, an SVG.", show_default=False)
    ] = None,
    layer: Annotated[int, typer.Option(help="The first of two layers shown in it at close range.")] = 4,
    sms: Annotated[int | None, typer.Option(min=1, help="Only so many SMs.", show_default=False)] = None,
) -> None:
    """Record a launch with random weights on this machine's GPU: print where time goes, write a trace.

    Example: headrace trace north-1x8k.json --point 1x8K
    """
    from headrace.bench.decode import Method
    from headrace.bench.points import parse_point
    from headrace.bench.traced import trace_decode
    from headrace.kernel.trace_events import write_events
    from headrace.kernel.trace_picture import in_words, timeline_of
    from headrace.kernel.trace_summary import lines, memory_lines
    from headrace.model.synthetic import preset
    from headrace.step.draw import write_picture

    console.check_folders(file, image)
    config, parsed = preset(synthetic), parse_point(point)
    if not 0 <= layer < config.num_layers:
        raise console.RefusedError(f"there is no layer {layer}: the model has 0 to {config.num_layers - 1}")
    with console.progress_bars() as bars:
        traced = trace_decode(
            config,
            parsed,
            method=Method(launches=10, steps=steps),
            progress=bars,
            tell=console.err.print,
        )
    for line in (*lines(traced.trace), "", *memory_lines(traced.trace, traced.read)):
        console.out.print(line, markup=False, soft_wrap=True)
    console.out.print(
        f"\nby the wall clock {traced.recording:.3f} ms a step, {traced.plain:.3f} without recording "
        f"({traced.cost:+.1%})"
    )
    if image is not None:
        title = f"One decode step of {synthetic}: {point}"
        with image.open("w", encoding="utf-8") as out:
            write_picture(
                timeline_of(traced.trace), out, title=title, layer=layer, words=in_words(traced.trace)
            )
    if file is not None:
        last = range(max(traced.trace.steps - shown, 0), traced.trace.steps)
        chosen = range(min(sms or traced.trace.plan.sizes.sms, traced.trace.plan.sizes.sms))
        with file.open("w", encoding="utf-8") as out:
            write_events(traced.trace, out, steps=last, sms=chosen)
