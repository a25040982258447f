# SPDX-License-Identifier: Apache-2.0
"""The command line: its subcommands put together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from omni_npu_phase import __version__
from omni_npu_phase.commands import bench, bench_speech, doctor, lint, trace, validate, verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Whether vLLM-Omni's model runners, and models on them, tell a prompt's last token from a generated one.",
)


def _add(function: Callable[..., Any], epilog: str) -> None:
    # Typer keeps the line ends of a docstring, wherever the terminal's own line ends.
    text = inspect.getdoc(function) or ""
    app.command(help="\n\n".join(" ".join(part.split()) for part in text.split("\n\n")), epilog=epilog)(function)


_add(doctor.doctor, doctor.EPILOG)
_add(lint.lint, lint.EPILOG)
app.add_typer(trace.app, name="trace")
_add(verify.verify, verify.EPILOG)
_add(validate.validate, validate.EPILOG)
_add(bench.bench, bench.EPILOG)
_add(bench_speech.bench_speech, bench_speech.EPILOG)


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
