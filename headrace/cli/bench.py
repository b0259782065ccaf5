"""`headrace bench`: how fast the decode kernel is on this machine, and saved results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headrace.cli import console
from headrace.cli.options import command

if TYPE_CHECKING:
    from headrace.bench.compare import Results
    from headrace.bench.decode import Measured
    from headrace.bench.power import Power

bench_app = typer.Typer(help="Measure speed, and compare what was measured.", no_args_is_help=True)
_COLUMNS = (
    *("rows", "context", "ms a step", "spread", "tokens/s"),
    *("GB a step", "experts", "uniform", "of limit"),
)
_LIMITED = "* At its power limit: the GPU lowered its clock, and one that stays cooler would be faster."


def decode(
    point: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROWSxCONTEXT",
            help="What to measure, such as 4x8K, or 8x1K..64K for rows of mixed lengths; again for more. "
            "Default: ten points from 1 to 16 rows and 1K to 256K.",
            show_default=False,
        ),
    ] = None,
    synthetic: Annotated[
        str, typer.Option(metavar="NAME", help="The model whose sizes are meant.")
    ] = "north-mini-code",
    launches: Annotated[int, typer.Option(min=2, help="Timed launches of each point.")] = 20,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Steps a launch.")] = 16,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="TB/S",
            help="The memory's, which the limit follows from. Default: by the device's datasheet.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Where the results go.", show_default=False)] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(help="vLLM's results on this machine, for another column.", show_default=False),
    ] = None,
) -> None:
    """Time decode steps with random weights on this machine's GPU: the host's whole loop, by the wall clock.

    Example: headrace bench decode --point 1x8K --point 16x8K --json results.json
    """
    from headrace.bench.compare import merged, read_results
    from headrace.bench.decode import Method, bench_decode
    from headrace.bench.points import DEFAULT_POINTS, parse_point
    from headrace.bench.results import origin, write
    from headrace.model.synthetic import preset

    if bandwidth is not None and not bandwidth > 0:
        raise console.RefusedError(f"--bandwidth is {bandwidth:g}: give TB/s above 0")
    config = preset(synthetic)
    points = [parse_point(text) for text in point or DEFAULT_POINTS]
    others = None if vllm is None else read_results(vllm)
    about = origin()
    measured: list[Measured] = []
    with console.progress_bars() as bars:
        for result in bench_decode(
            config,
            points,
            bandwidth=None if bandwidth is None else bandwidth * 1e12,
            method=Method(launches=launches, steps=steps),
            progress=bars,
            tell=console.err.print,
        ):
            measured.append(result)
            console.err.print(one_line(result))
            found = [each.as_json() for each in measured]
            if json is not None:  # after every point, so that a run that is cut short keeps what it has
                write(
                    json,
                    {
                        **about,
                        "model": synthetic,
                        "bandwidth": result.bandwidth,
                        "steps": steps,
                        "launches": launches,
                        "points": found if others is None else merged(found, others),
                    },
                )
    console.out.print(table_of(measured, others, f"{synthetic} on {about['machine']}"))
    if not all(result.spreads for result in measured):
        console.err.print("[yellow]The router does not spread: fewer experts are read than a model would.[/]")


def compare(
    files: Annotated[list[Path], typer.Argument(help="Results of ours or of vLLM's; the first is 1.")],
    phase: Annotated[str, typer.Option(help="Of a vLLM file with several, which.")] = "own",
) -> None:
    """Put saved results side by side: tokens a second, and how many times as fast the first file is.

    Example: headrace bench compare benchmarks/results/decode-h200.json vllm.json
    """
    from headrace.bench.compare import read_results

    console.out.print(comparison([read_results(file, phase=phase) for file in files]))


def one_line(result: Measured) -> str:
    from headrace.bench.points import name_of

    name = f"{result.point.rows} x {name_of(result.point.rows, result.point.context)}"
    return f"{name}: {result.median:.3f} ms a step, {result.share:.1%} of the limit"


def table_of(measured: list[Measured], others: Results | None, title: str) -> Table:
    """A row for every point."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        caption_style="",
        box=None,
        pad_edge=False,
        collapse_padding=True,  # one space between columns: 80 characters hold them
    )
    watched = any(result.power for result in measured)
    if any(result.power and result.power.limited for result in measured):
        table.caption = _LIMITED
    for heading in (*_COLUMNS, *(("MHz", "W") if watched else ()), *(("vLLM", "ratio") if others else ())):
        table.add_column(heading, justify="right")
    for result in measured:
        cells = _cells(result)
        if watched:
            cells += _power_cells(result.power)
        if others:
            cells += _vllm_cells(result, others)
        table.add_row(*cells)
    return table


def _cells(result: Measured) -> list[str]:
    """Those of _COLUMNS."""
    from headrace.bench.points import name_of

    return [
        f"{result.point.rows}",
        name_of(result.point.rows, result.point.context),
        f"{result.median:.3f}",
        f"{result.spread:.3f}",
        f"{result.tokens_per_second:,.1f}",
        f"{result.read.total / 1e9:.3f}",
        f"{result.experts:,.0f}",
        f"{result.uniform:,.0f}",
        f"{result.share:.1%}",
    ]


def _vllm_cells(result: Measured, others: Results) -> list[str]:
    from headrace.bench.compare import merged

    (with_vllm,) = merged([result.as_json()], others)
    theirs = with_vllm["vllm_tokens_per_s"]
    return ["", ""] if theirs is None else [f"{theirs:,.1f}", f"{result.tokens_per_second / theirs:.2f}"]


def _power_cells(power: Power | None) -> list[str]:
    if power is None:
        return ["", ""]
    return [f"{power.sm_clock_mhz:,.0f}", f"{'*' if power.limited else ''}{power.watts:.0f}"]


def comparison(results: list[Results]) -> Table:
    """A row for every point of any file, two columns a file."""
    from headrace.bench.compare import keys_of
    from headrace.bench.points import name_of

    table = Table(box=None)
    table.add_column("rows", justify="right")
    table.add_column("context", justify="right")
    for number, one in enumerate(results):
        table.add_column(f"{one.title}\n{one.machine}\ntokens/s", justify="right")
        if number:
            table.add_column("\n\nratio", justify="right")
    for key in keys_of(results):
        rows, context = key
        cells = [str(rows), name_of(rows, context if isinstance(context, int) else list(context))]
        first = results[0].speeds.get(key)
        for number, one in enumerate(results):
            speed = one.speeds.get(key)
            cells.append("" if speed is None else f"{speed.tokens_per_second:,.1f}")
            if number:
                cells.append(
                    f"{first.tokens_per_second / speed.tokens_per_second:.2f}" if first and speed else ""
                )
        table.add_row(*cells)
    return table


for each in (decode, compare):
    command(bench_app)(each)
