# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase trace``: look at traces, check them, compare them, take them elsewhere."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from omni_npu_phase.commands import console
from omni_npu_phase.contract import CLAUSES, FIELDS
from omni_npu_phase.settings import TRACE_VARIABLE
from omni_npu_phase.tracing import schema
from omni_npu_phase.tracing.schema import Row, Step, Trace, TraceError

SHOWN_ROWS = 200
SHOWN_FINDINGS = 20
SHOWN_PANELS = 12
SAMPLE = Path(schema.__file__).with_name("sample.jsonl")
"""A tiny Qwen3-TTS on a runner that was broken on purpose: it takes every span of one token for decode."""
_UNREADABLE = "2 a file that is no trace, or of a newer schema, or wrong use."

app = typer.Typer(
    no_args_is_help=True,
    help=f"Look at what a serving engine recorded ({TRACE_VARIABLE}=DIR): every row of every step.",
)


class FormatOption(str, Enum):
    table = "table"
    json = "json"


class PhaseOption(str, Enum):
    prefill = "prefill"
    tail = "tail"
    decode = "decode"


_Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE|DIR|sample", help="A trace, or a folder of traces; sample: one that comes with this package."
    ),
]
_Format = Annotated[FormatOption, typer.Option("--format", help="How to write it.")]


@app.command(epilog=f"Exit status: 0; {_UNREADABLE}")
def show(
    source: _Source,
    request: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this request; may be repeated.")] = None,
    step: Annotated[str | None, typer.Option(metavar="N|A-B", help="Only this step, or these.")] = None,
    phase: Annotated[PhaseOption | None, typer.Option(help="Only rows of this phase; a tail is prefill too.")] = None,
    tail: Annotated[bool, typer.Option("--tail", help="Only one-token prefill tails.")] = False,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of the table at most.")] = SHOWN_ROWS,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the requests too.")] = None,
    report_format: _Format = FormatOption.table,
) -> None:
    """Show rows over the steps: request, P, C, S, phase, hook, MTP position, and what the hook was told."""
    steps = _steps(step)
    if plot is not None and plot.suffix.lower() != ".png":
        console.stop(f"--plot {plot}: a name that ends in .png")
    tails = tail or phase is PhaseOption.tail
    wanted = None if phase in (None, PhaseOption.tail) else phase.value

    def chosen(each: Step) -> list[Row]:
        return schema.selected(each, requests=request or (), steps=steps, phase=wanted, tail=tails)

    with _reading(source) as traces:
        found = [(trace, each, row) for trace in traces for each in trace.steps() for row in chosen(each)]
        if plot is not None:
            _plot(found, plot)
    notes = [note for trace in traces for note in trace.notes]
    if report_format is FormatOption.json:
        listed = [
            {"file": trace.path.name, "step": each.number, "time": each.time, **row.named} for trace, each, row in found
        ]
        document = {"schema": schema.SCHEMA, "rows": listed, "notes": notes}
        console.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", None)
        return
    parts: list[Table | str] = []
    for trace in traces:
        own = [(each, row) for source_trace, each, row in found if source_trace is trace]
        if own or not found:
            parts.append(_row_table(trace, own[:rows]))
        if len(own) > rows:
            parts.append(f"{len(own) - rows} more rows: choose by --request, --step, --phase or --tail, or give --rows")
    console.write([*parts, *map(console.escape, notes)], None)


@app.command(
    epilog=f"Exit status: 0 no breach of a clause; 1 a breach; {_UNREADABLE} A trace in which nothing could be judged "
    "is 2 as well."
)
def check(source: _Source, report_format: _Format = FormatOption.table) -> None:
    """Judge every clause of the contract that a trace alone can show.

    What lies in buffers is in no trace: verify judges the rest.
    """
    from omni_npu_phase.tracing import check as checks

    with _reading(source) as traces:
        result = checks.check(traces)
    if report_format is FormatOption.json:
        console.write_text(json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n", None)
    else:
        console.write(_check_parts(checks.SHOWN, result), None)
    if not result.holds:
        raise typer.Exit(console.FAILED)
    if not result.judged:
        console.stop(f"{source}: nothing was recorded that a clause could be judged by")


@app.command(epilog=f"Exit status: 0 the same; 1 different; {_UNREADABLE}")
def compare(
    source: Annotated[Path, typer.Argument(metavar="A", help="A trace, or a folder of traces.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="B", help="Another; left out: the ranks in folder A must be the same.")
    ] = None,
    report_format: _Format = FormatOption.table,
) -> None:
    """Find the first step at which two traces differ, or at which the ranks of a stage do. Times are not compared."""
    from omni_npu_phase.tracing import compare as comparing

    with console.progress() as say:
        say("reading traces")
        try:
            results = [comparing.compare(*pair) for pair in comparing.pairs(source, other)]
        except TraceError as error:
            console.stop(str(error))
    if report_format is FormatOption.json:
        document = [each.as_dict() for each in results]
        console.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", None)
    else:
        console.write_text("".join(f"{line}\n" for each in results for line in each.lines()), None)
    if any(each.difference for each in results):
        raise typer.Exit(console.FAILED)


@app.command(epilog=f"Exit status: 0 written; {_UNREADABLE}")
def export(
    source: _Source,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; trace.perfetto.json or trace.csv.")
    ] = None,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="For the Perfetto viewer (ui.perfetto.dev): the default.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="A table with a line for each row of each step.")] = False,
) -> None:
    """Write traces for other tools: for the Perfetto viewer, with how long requests wait for a stage, or as CSV."""
    from omni_npu_phase.tracing.perfetto import events

    if perfetto and as_csv:
        console.stop("--perfetto and --csv: one of them, for one file")
    with _reading(source) as traces:
        if as_csv:
            text = _csv(traces)
        else:
            text = json.dumps({"traceEvents": list(events(traces)), "displayTimeUnit": "ms"}, ensure_ascii=False) + "\n"
    path = output or Path("trace.csv" if as_csv else "trace.perfetto.json")
    console.write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def _csv(traces: Sequence[Trace]) -> str:
    """A line for each row; what a hook was told has a column for each field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ranks = ("stage", "replica", "dp", "pp", "tp", "pid")
    writer.writerow([*ranks, "step", "time", "took", *schema.COLUMNS[:-1], *FIELDS, "error"])
    for trace in traces:
        rank = [getattr(trace.header, name) for name in ranks]
        for step in trace.steps():
            for row in step.rows:
                *values, told = row.as_json()
                told = told or [None] * len(FIELDS)
                writer.writerow([*rank, step.number, step.time, step.took, *values, *told, step.error])
    return text.getvalue()


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[list[Trace]]:
    """The traces at a path; what is wrong with them ends the command in one line."""
    with console.progress() as say:
        say("reading traces")
        try:
            yield schema.find(SAMPLE if source == Path("sample") and not source.exists() else source)
        except TraceError as error:
            console.stop(str(error))


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    try:
        steps = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        console.stop(f"--step takes a number or A-B, not {text!r}")
    if not steps:
        console.stop(f"--step {text}: there is no step from {steps.start} to {steps.stop - 1}")
    return steps


_COLUMNS = ("step", "request", "P", "C", "S", "phase", "marks", "hook", "MTP", "told")


def _row_table(trace: Trace, rows: Sequence[tuple[Step, Row]]) -> Table:
    header = trace.header
    kind = "with the mixin" if header.mixin else "as it is"
    table = Table(title=f"{header.title}: {header.model}, {header.runner} {kind}", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in ("step", "P", "C", "S", "MTP") else "left", overflow="fold")
    for step, row in rows:
        table.add_row(str(step.number), *map(console.escape, _cells(row)), style="bold" if row.lengths.tail else None)
    return table


def _cells(row: Row) -> list[str]:
    given = f"given {row.given}" if row.given else ""
    marks = [name for name, there in (("crosses", row.crosses), ("replay", row.replay), (given, row.given)) if there]
    hook = (row.hook or "") + ("" if row.call is None else f" {row.call}")
    right = row.told == list((row.new or row).lengths.fields.values())
    told = "" if row.told is None else "right" if right else json.dumps(row.told)
    lengths = [str(value) for value in (row.prompt_len, row.num_computed, row.span)]
    return [row.request, *lengths, row.phase, " ".join(marks), hook, "" if row.mtp is None else str(row.mtp), told]


def _check_parts(shown: Sequence[str], result: Any) -> list[Table | str]:
    table = Table()
    for name in ("clause", "judged", "breaches", "what holds, or was seen first"):
        table.add_column(name, justify="right" if name in ("judged", "breaches") else "left", overflow="fold")
    for clause in shown:
        own = [finding for finding in result.findings if finding.clause == clause]
        if result.judged[clause]:
            seen = f"{own[0].file}, step {own[0].step}: {own[0].seen}" if own else CLAUSES[clause].sentence
            style = "bold red" if own else None
            table.add_row(clause, str(result.judged[clause]), str(len(own)), console.escape(seen), style=style)
    parts: list[Table | str] = [table]
    silent = [clause for clause in shown if not result.judged[clause]]
    if silent:
        parts.append(f"No row shows {', '.join(silent)}.")
    files = f"{len(result.files)} file{'s' * (len(result.files) != 1)}, {result.steps} steps"
    count = len(result.findings)
    breaches = f"{count} breach{'es' * (count != 1)}" if count else "no breach"
    parts.append(f"{files}: {breaches}")
    parts += [console.escape(str(finding)) for finding in result.findings[:SHOWN_FINDINGS]]
    if len(result.findings) > SHOWN_FINDINGS:
        parts.append(f"and {len(result.findings) - SHOWN_FINDINGS} more: --format json has all")
    return [*parts, *map(console.escape, result.notes)]


def _plot(found: Sequence[tuple[Trace, Step, Row]], path: Path) -> None:
    try:
        from omni_npu_phase.tracing import picture
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        console.stop("--plot needs matplotlib; pip install matplotlib")
    requests: dict[str, list[Row]] = {}
    several = len({trace.path for trace, _, _ in found}) > 1
    for trace, _, row in found:
        name = f"{row.request}, {trace.header.title}" if several else row.request
        requests.setdefault(name, []).append(row)
    if not requests:
        console.stop("no row to draw")
    drawn = dict(list(requests.items())[:SHOWN_PANELS])
    rest = "" if len(drawn) == len(requests) else f", {len(drawn)} of {len(requests)} requests"
    console.write_whole(path, lambda part: picture.draw(drawn, part, f"rows over the steps{rest}"))
