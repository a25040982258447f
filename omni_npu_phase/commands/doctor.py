# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase doctor``: whether an installation, and a model on it, is safe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from omni_npu_phase.commands import console

EPILOG = (
    "Exit status: 0 runner and model are safe for chunked prefill; 1 one of them is not; 2 it cannot tell, for "
    "example because no model was named, or wrong use."
)


def doctor(
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR|MODULE[:CLASS]", help="Look at this model too: a checkpoint's folder, or its code."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON.")] = False,
) -> None:
    """Say whether this installation, and a model on it, is safe for chunked prefill, and what to change.

    The runners are judged by a few scenarios, as verify runs them; a model by a look at its source.
    """
    from omni_npu_phase import doctor as doctors
    from omni_npu_phase.lint.checkpoint import UnknownModelError

    if model is not None:
        # As with python -m: a module of the current folder is found.
        sys.path.insert(0, str(Path.cwd()))
    with console.progress() as say:
        say("examining the installation")
        try:
            report = doctors.examine(model)
        except (UnknownModelError, ValueError) as error:
            console.stop(str(error))
    if as_json:
        console.write_text(report.to_json(), None)
    else:
        table = Table(show_header=False)
        for what, found in report.lines():
            table.add_row(what, console.escape(found))
        console.write([table], None)
    raise typer.Exit(report.exit_status)
