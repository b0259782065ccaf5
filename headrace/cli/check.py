"""`headrace check`: whether the decode kernel is right on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import console

WRONG = 1  # the exit code for a kernel that is not right


def check(
    json: Annotated[Path | None, typer.Option(help="Where the results go.", show_default=False)] = None,
) -> None:
    """Compare the decode kernel with its plan's interpreter and with PyTorch, on this machine's GPU.

    Takes about a minute. Exit code 0 if all is well, 1 if a comparison fails, 2 if there is no Hopper GPU.
    """
    import torch

    from headrace.bench.results import origin, write
    from headrace.kernel.check.suite import Suite, verdict

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise console.RefusedError("the decode kernel needs a Hopper GPU, and there is none here")
    micro = _north_micro()
    if micro is None:
        console.err.print("The weights of north-micro are not here: the checks that need them are left out.")
    suite = Suite(micro, sms=torch.cuda.get_device_properties(0).multi_processor_count)
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


def _north_micro() -> Path | None:
    from headrace.load import SourceError, resolve

    try:
        return resolve("north-micro")
    except SourceError:
        return None
