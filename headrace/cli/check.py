"""`headrace check`: whether the decode kernel is right on this machine, and what a layer of it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headrace.cli import console
from headrace.cli.options import Source, Synthetic, config_of

if TYPE_CHECKING:
    from headrace.kernel.check.layer import Left
    from headrace.step.pack import PackedWeights

WRONG = 1  # the exit code for a kernel that is not right


def check(
    model: Source = None,
    synthetic: Synthetic = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Compare every buffer of this layer of MODEL instead.", show_default=False),
    ] = None,
    buffers: Annotated[
        Path | None,
        typer.Option(help="Where the buffers of the layer go, as .npz.", show_default=False),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Where the results go.", show_default=False)] = None,
) -> None:
    """Compare the decode kernel with its plan's interpreter and with PyTorch, on this machine's GPU.

    Takes about a minute. Exit code 0 if all is well, 1 if a comparison fails, 2 if there is no Hopper GPU.

    With --layer and a MODEL: a table of every buffer that this layer leaves, without a verdict.

    Example: headrace check north-micro --layer 7
    """
    import torch

    from headrace.model.hopper import has_hopper

    if not has_hopper():
        raise console.RefusedError("the decode kernel needs a Hopper GPU, and there is none here")
    console.check_folders(buffers)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if layer is not None:
        if json is not None:
            raise console.RefusedError(
                "--json is for the whole check: --buffers FILE keeps a layer's buffers"
            )
        _check_layer(model, synthetic, layer, buffers, sms)
    elif model is not None or synthetic is not None or buffers is not None:
        raise console.RefusedError(
            "a model and --buffers go with --layer: the whole check brings its own models"
        )
    else:
        _check_all(json, sms)


def _check_all(json: Path | None, sms: int) -> None:
    from headrace.bench.results import origin, write
    from headrace.kernel.check.suite import Suite, verdict

    micro = _north_micro()
    if micro is None:
        console.err.print("The weights of north-micro are not here: the checks that need them are left out.")
    suite = Suite(micro, sms=sms)
    suite.compile(console.err.print)
    checks = []
    for planned in suite.checks():
        checks.append(planned.run())
        console.out.print(str(checks[-1]), markup=False, soft_wrap=True)
    if json is not None:
        write(json, origin() | {"checks": [each.as_json() for each in checks]})
    console.out.print(verdict(checks))
    if not all(each.passed for each in checks):
        raise typer.Exit(WRONG)


def _check_layer(
    model: str | None, synthetic: str | None, layer: int, buffers: Path | None, sms: int
) -> None:
    from headrace.kernel.check.layer import left_by_last_layer, save

    left = left_by_last_layer(_first_layers(model, synthetic, layer), sms=sms)
    console.out.print(_table(left))
    if buffers is not None:
        save(left, buffers)


def _first_layers(model: str | None, synthetic: str | None, last: int) -> PackedWeights:
    """The weights of a model up to a layer. Raises RefusedError if it has no such layer."""
    import torch

    from headrace.load import resolve
    from headrace.step.pack import pack_checkpoint, pack_synthetic

    config = config_of(model, synthetic)
    if not 0 <= last < config.num_layers:
        raise console.RefusedError(f"there is no layer {last}: the model has 0 to {config.num_layers - 1}")
    with console.progress_bars() as bars:
        if model is None:
            cut = replace(config, layers=config.layers[: last + 1])
            return pack_synthetic(cut, device="cuda", dtype=torch.bfloat16, progress=bars)
        return pack_checkpoint(
            resolve(model), device="cuda", dtype=torch.bfloat16, layers=last + 1, progress=bars
        )


def _table(left: list[Left]) -> Table:
    table = Table("buffer", "shape", "relative error", "largest difference")
    for one in left:
        shape = " x ".join(map(str, one.kernel.shape))
        table.add_row(one.name, shape, f"{one.error:.2g}", f"{one.largest:.2g}")
    return table


def _north_micro() -> Path | None:
    from headrace.load import SourceError, resolve

    try:
        return resolve("north-micro")
    except SourceError:
        return None
