"""`headrace plan`: a decode step's plan, to look at and to check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headrace.cli import console
from headrace.cli.options import Source, Synthetic, command, config_of

if TYPE_CHECKING:
    from headrace.model.config import ModelConfig
    from headrace.step.plan import Plan

plan_app = typer.Typer(help="Look at the plan of a decode step, and check it.", no_args_is_help=True)

UNSOUND = 1  # the exit code for a plan with faults


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Which plan."""

    model: Source = None
    synthetic: Synthetic = None
    rows: Annotated[int, typer.Option(help="Rows that a step can have: 1, 2, 4, 8 or 16.")] = 1
    sms: Annotated[int, typer.Option(help="Multiprocessors that share the work: an H200 has 132.")] = 132

    def build(self) -> Plan:
        """Only the model's configuration is read. Raises PlanError where there is no plan."""
        from headrace.step.planner import build_plan

        return build_plan(self.config(), rows=self.rows, sms=self.sms)

    def config(self) -> ModelConfig:
        return config_of(self.model, self.synthetic)


def show(
    flags: PlanFlags,
    sm: Annotated[int | None, typer.Option(help="List the tasks of this SM.", show_default=False)] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="List tasks of this layer only, of SM 0 if --sm says no other.", show_default=False
        ),
    ] = None,
) -> None:
    """Print a plan's figures, or the tasks of one of its SMs.

    Example: headrace plan show --synthetic north-mini-code --sm 0 --layer 3
    """
    from headrace.step.text import listing

    plan = flags.build()
    if sm is None and layer is None:
        console.out.print(_figures(plan))
        return
    sm = sm or 0
    if not 0 <= sm < plan.sizes.sms:
        raise console.RefusedError(f"there is no SM {sm}: the plan has SMs 0 to {plan.sizes.sms - 1}")
    if layer is not None and not 0 <= layer < plan.sizes.layers:
        raise console.RefusedError(f"there is no layer {layer}: the model has 0 to {plan.sizes.layers - 1}")
    for line in listing(plan, sm, layer):
        console.out.print(line, markup=False, soft_wrap=True)


def check(flags: PlanFlags) -> None:
    """Prove that a plan is sound: waits, order, coverage, pages, budgets. Exit code 1 if it is not.

    Example: headrace plan check --synthetic north-mini-code --rows 1 --sms 132
    """
    import time

    from headrace.step.checker import check as faults_of
    from headrace.step.planner import build_plan

    config = flags.config()
    begun = time.perf_counter()
    plan = build_plan(config, rows=flags.rows, sms=flags.sms)
    built = time.perf_counter()
    faults = faults_of(plan)
    checked = time.perf_counter()
    console.out.print(_figures(plan))
    for fault in faults:
        console.out.print(str(fault), markup=False, soft_wrap=True)
    verdict = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}" if faults else "sound"
    console.out.print(f"{verdict}; built in {built - begun:.2f} s, checked in {checked - built:.2f} s")
    if faults:
        raise typer.Exit(UNSOUND)


def draw(
    flags: PlanFlags,
    image: Annotated[
        Path | None, typer.Option(help="Where the picture goes, an SVG.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Where the trace goes, for ui.perfetto.dev.", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens that every row has.")] = 8192,
    layer: Annotated[
        int | None,
        typer.Option(
            help="The first of two layers shown at close range. Default: 4, or the last.", show_default=False
        ),
    ] = None,
) -> None:
    """Predict how long a step takes, and draw what every SM does meanwhile.

    Constants are those of an H200. Example: headrace plan draw --synthetic north-mini-code --image step.svg
    """
    from headrace.step.cost import Costs, simulate
    from headrace.step.draw import verdict, write_picture, write_trace
    from headrace.step.workload import plan_works

    console.check_folders(image, trace)
    config = flags.config()
    if not 1 <= context <= config.max_positions:
        raise console.RefusedError(f"--context {context} is not from 1 to {config.max_positions}")
    layer = min(4, config.num_layers - 1) if layer is None else layer
    if not 0 <= layer < config.num_layers:
        raise console.RefusedError(f"there is no layer {layer}: the model has 0 to {config.num_layers - 1}")
    plan = flags.build()
    timeline = simulate(
        plan_works(plan, context=context),
        ring_pages=plan.machine.ring_pages,
        in_flight=plan.machine.in_flight,
        costs=Costs(),
    )
    console.out.print(verdict(timeline))
    if image is not None:
        name = flags.synthetic or flags.model
        rows = "1 row" if flags.rows == 1 else f"{flags.rows} rows"
        title = f"One decode step of {name}: {rows}, {context:,} tokens of context, {flags.sms} SMs"
        with image.open("w", encoding="utf-8") as file:
            write_picture(timeline, file, title=title, layer=layer)
    if trace is not None:
        with trace.open("w", encoding="utf-8") as file:
            write_trace(timeline, file)


def _figures(plan: Plan) -> Table:
    from headrace.step.report import summary

    table = Table("", "", title="Plan", title_justify="left", title_style="bold", show_header=False, box=None)
    for label, figure in summary(plan).items():
        table.add_row(label, figure)
    return table


for each in (show, check, draw):
    command(plan_app)(each)
