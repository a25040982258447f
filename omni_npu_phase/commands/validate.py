# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase validate``: speech with chunked prefill against speech without."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from omni_npu_phase.commands import console

EPILOG = (
    "Exit status: 0 the runs speak the same; 1 they do not, or nothing was proven; 2 the run was impossible or was "
    "interrupted, with the reason. The report, the audio and a picture are in the output folder; those of an earlier "
    "run are removed at the start."
)


class DeviceOption(str, Enum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"
    emulated = "emulated"


class FormatOption(str, Enum):
    table = "table"
    json = "json"
    markdown = "markdown"


def validate(
    model: Annotated[
        str, typer.Option(metavar="DIR|tiny", help="A Qwen3-TTS CustomVoice checkpoint; tiny is made when first used.")
    ] = "tiny",
    device: Annotated[
        DeviceOption, typer.Option(help="Where the engines run; emulated: vLLM-Ascend, its device emulated on the CPU.")
    ] = DeviceOption.cpu,
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
    beside: Annotated[
        int, typer.Option(metavar="N", min=0, help="Speak each text among N others too: its codes must be the same.")
    ] = 0,
    report_format: Annotated[FormatOption, typer.Option("--format", help="What to print.")] = (FormatOption.table),
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where reports, audio and the picture go.")] = Path(
        "speech-report"
    ),
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="For each engine's imports, for its start, and for each text it speaks."),
    ] = 600,
    preempted: Annotated[
        bool, typer.Option("--preempt", help="Speak all texts at once with too few KV blocks, with and without replay.")
    ] = False,
    kv_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="With --preempt: KV blocks of the engines with too few.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show what the engine wrote when it fails.")] = False,
) -> None:
    """Speak texts with chunked prefill and without, and compare codes and audio.

    Both engines are vLLM-Omni's own, with the mixin in their runners. When a prompt is chunked, its last token must be
    alone in a step; else nothing is proven.

    With --preempt the texts are spoken at once, by engines of the talker alone: with enough KV blocks, with so few that
    requests are preempted, and with as few and OMNI_NPU_PHASE_REPLAY=exact. Codes are compared.
    """
    from omni_npu_phase.speech import report as speech_reports
    from omni_npu_phase.speech.engine import EngineError
    from omni_npu_phase.speech.validate import TEXTS, BadInputError, Options, validate_preempted
    from omni_npu_phase.speech.validate import validate as run

    options = Options(
        model="tiny" if model == "tiny" else Path(model),
        output=output,
        device=device.value,
        texts=tuple(text) if text else TEXTS,
        speaker=speaker,
        language=language,
        budget=budget,
        max_tokens=max_tokens,
        beside=beside,
        timeout=timeout,
        kv_blocks=kv_blocks,
    )
    report: Any
    try:
        with console.signals_raised(), console.progress() as say:
            report = validate_preempted(options, say) if preempted else run(options, say)
    except (BadInputError, EngineError) as error:
        if debug:
            sys.stderr.write(getattr(error, "log", ""))
        console.stop(str(error))
    except console.InterruptedByError as error:
        console.stop(f"ended by {error.name}, without a report")
    if report_format is FormatOption.table:
        console.write(_preempted_table(report) if preempted else _speech_table(speech_reports, report), None)
    else:
        console.write_text(report.to_json() if report_format is FormatOption.json else report.to_markdown(), None)
    if report.verdict != "equal":
        raise typer.Exit(console.FAILED)


def _preempted_table(report: Any) -> list[Table | str]:
    from omni_npu_phase.speech.preempt import COLUMNS

    table = Table()
    for header in COLUMNS:
        table.add_column(header, overflow="fold")
    for row in report.rows():
        table.add_row(*map(console.escape, row))
    return [table, console.escape(report.summary())]


def _speech_table(speech_reports: Any, report: Any) -> list[Table | str]:
    table = Table()
    for header in speech_reports.COLUMNS:
        table.add_column(header, overflow="fold")
    for comparison in report.comparisons:
        table.add_row(*(console.escape(cell) for cell in speech_reports.comparison_row(comparison)))
    parts: list[Table | str] = [table, console.escape(report.summary())]
    difference = report.first_difference()
    if difference is not None:
        parts += [console.escape(f"First difference: {speech_reports.difference_text(difference)}")]
        parts += [console.escape(row) for row in difference["rows"]]
    return parts
