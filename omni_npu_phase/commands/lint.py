# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase lint``: model code that does not keep the contract."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from omni_npu_phase.commands import console
from omni_npu_phase.lint.rules import RULES

EPILOG = (
    "An error is a fault on every runner; a fallback is right while the runner keeps the contract and no request is "
    "replayed; unknown means that lint cannot tell, so read that hook yourself; a note is worth knowing. To ignore a "
    "finding, write on its line, or alone on the line before it: # omni-phase: ignore\\[rule] reason. Exit status: "
    "0 no errors; 1 errors, or what --fail-on names; 2 something could not be read, or wrong use."
)


class FormatOption(str, Enum):
    text = "text"
    json = "json"
    github = "github"


class FailOption(str, Enum):
    error = "error"
    fallback = "fallback"
    unknown = "unknown"
    note = "note"


def lint(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", help="Python files, and folders with them.")
    ] = None,
    report_format: Annotated[FormatOption, typer.Option("--format", help="What to print.")] = FormatOption.text,
    fail_on: Annotated[FailOption, typer.Option(help="The least grave severity that gives exit status 1.")] = (
        FailOption.error
    ),
    rules: Annotated[bool, typer.Option("--rules", help="List the rules, and what to write instead.")] = False,
) -> None:
    """Find model code that guesses whether a row is prompt, instead of reading the runner's fields.

    Lint reads the source of every class with a preprocess hook, and imports none of it. It follows each hook, with the
    functions that the hook calls in its package, for a chunk of a prompt, for a prompt's last token alone, and for
    decode. A hook that treats the last token of a prompt like decode is wrong on any runner.
    """
    from omni_npu_phase.lint import files
    from omni_npu_phase.lint.source import UnreadableError

    if rules:
        console.write([_rules_table()], None)
        return
    if not paths:
        console.stop("name a Python file or a folder; see: omni-npu-phase lint --help")
    with console.progress() as say:
        say("reading files")
        try:
            report = files.lint(paths, say)
        except UnreadableError as error:
            console.stop(str(error))
    writers = {
        FormatOption.text: report.to_text,
        FormatOption.json: report.to_json,
        FormatOption.github: report.to_github,
    }
    console.write_text(writers[report_format](), None)
    if report.unread:
        console.stop("; ".join(report.unread))
    if report.reaches(fail_on.value):
        raise typer.Exit(console.FAILED)


def _rules_table() -> Table:
    table = Table()
    for header in ("rule", "clause", "severity", "finds", "write instead"):
        table.add_column(header, overflow="fold")
    for rule in RULES.values():
        row = (rule.id, rule.clause or "", " or ".join(rule.severities), rule.finds, rule.fix)
        table.add_row(*(console.escape(cell) for cell in row))
    return table
