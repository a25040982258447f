# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase bench-speech``: how fast the whole pipeline speaks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from omni_npu_phase.commands import console

EPILOG = (
    "Exit status: 0 it was measured; 2 it could not be, with the reason. Numbers are of this machine at this moment: "
    "its load average stands beneath the tables."
)


def bench_speech(
    requests: Annotated[
        list[int] | None,
        typer.Option(min=1, max=256, metavar="N", help="Concurrent requests; may be repeated; 1, 8, 32 when left out."),
    ] = None,
    frames: Annotated[int, typer.Option(min=2, metavar="N", help="Of each of these requests.")] = 24,
    neighbours: Annotated[
        int, typer.Option(min=1, max=15, metavar="N", help="Requests that speak while a long prompt comes.")
    ] = 4,
    long_prompt: Annotated[
        int, typer.Option("--long", min=400, max=4000, metavar="N", help="Characters of the long prompt.")
    ] = 2400,
    budget: Annotated[
        int, typer.Option(min=16, max=256, metavar="N", help="Tokens a step where the long prompt is chunked.")
    ] = 128,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often everything is measured.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show what the engine wrote when it fails.")] = False,
) -> None:
    """Time the whole pipeline: frames a second and first audio of a tiny Qwen3-TTS on this CPU.

    First the released runner beside the mixin, at several numbers of concurrent requests. Then a long prompt that comes
    while others speak, chunked beside unchunked, both with the mixin.
    """
    try:
        from omni_npu_phase.speech import throughput
    except ImportError as error:
        if error.name != "psutil":
            raise
        console.stop("bench-speech needs psutil; pip install psutil")
    from omni_npu_phase.speech import tiny_qwen3_tts
    from omni_npu_phase.speech.engine import EngineError

    try:
        with console.signals_raised(), console.progress() as say:
            say("the tiny checkpoint")
            options = throughput.Options(
                tiny_qwen3_tts.cached(),
                requests=tuple(dict.fromkeys(requests or throughput.REQUESTS)),
                frames=frames,
                rounds=rounds,
                neighbours=neighbours,
                long_prompt=long_prompt,
                budget=budget,
            )
            report = throughput.run(options, say)
    except (EngineError, RuntimeError, OSError) as error:
        if debug:
            sys.stderr.write(getattr(error, "log", ""))
        console.stop(str(error))
    except console.InterruptedByError as error:
        console.stop(f"ended by {error.name}, without a report")
    if as_json:
        console.write_text(report.to_json(), None)
    else:
        console.write(_tables(report), None)


def _tables(report: Any) -> list[Table | str]:
    concurrent = Table(title="Concurrent requests: the released runner beside the mixin", title_justify="left")
    for header in ("requests", "runner", "frames/s", "against released", "CPU ms/frame", "first audio, ms"):
        concurrent.add_column(header, justify="left" if header == "runner" else "right")
    for row in report.concurrent:
        rate, ratio = _spread(row.frames_per_second), _spread(row.ratio, digits=2)
        used = _spread(row.cpu_seconds_per_frame, factor=1000)
        concurrent.add_row(str(row.requests), row.runner, rate, ratio, used, _ms(row.first_audio_seconds))
    long_prompt = Table(title="A long prompt comes while others speak", title_justify="left")
    for header in (
        "prefill",
        "tokens a step",
        "P",
        "steps",
        "gap, ms",
        "while read, ms",
        "longest, ms",
        "first audio, ms",
    ):
        long_prompt.add_column(header, justify="left" if header == "prefill" else "right")
    for row in report.long_prompt:
        seconds = (row.usual_gap_seconds, row.reading_gap_seconds, row.longest_gap_seconds, row.first_audio_seconds)
        steps = _spread(row.reading_steps, digits=0)
        long_prompt.add_row(row.prefill, str(row.budget), str(row.prompt_len), steps, *map(_ms, seconds))
    runtime, options = report.runtime, report.options
    before, after = (" ".join(f"{value:.1f}" for value in load) for load in runtime["load_average"].values())
    lines = [
        f"Median (least to most) of {options.rounds} rounds; first audio of concurrent requests: of all requests.",
        f"Gap: between two frames of one of {options.neighbours} neighbours, usually, while the long prompt is read, "
        "and the longest then; first audio: of the long prompt. Recording the talker's steps there takes time in each.",
        ", ".join(f"{name} {version}" for name, version in runtime["packages"].items())
        + f"; {runtime['cores']} cores, load average {before} before, {after} after",
    ]
    return [concurrent, "", long_prompt, "", *map(console.escape, lines)]


def _spread(value: Any, factor: float = 1, digits: int = 1) -> str:
    median, least, most = (f"{number * factor:.{digits}f}" for number in (value.median, value.least, value.most))
    return median if least == most else f"{median} ({least} to {most})"


def _ms(value: Any) -> str:
    return _spread(value, factor=1000, digits=0)
