# SPDX-License-Identifier: Apache-2.0
"""The command line: its subcommands put together."""

from __future__ import annotations

from typing import Annotated

import typer

from omni_npu_phase import __version__
from omni_npu_phase.commands import bench, bench_speech, doctor, lint, trace, validate, verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The prefill/decode phase contract of vLLM-Omni: check that a model runner keeps it.",
)
app.command(epilog=verify.EPILOG)(verify.verify)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(epilog=lint.EPILOG)(lint.lint)
app.command(epilog=validate.EPILOG)(validate.validate)
app.add_typer(trace.app, name="trace")
app.command(epilog=bench.EPILOG)(bench.bench)
app.command(epilog=bench_speech.EPILOG)(bench_speech.bench_speech)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass
