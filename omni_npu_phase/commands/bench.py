# SPDX-License-Identifier: Apache-2.0
"""``omni-npu-phase bench``: what a step costs the host, the released runner beside the mixin."""

from __future__ import annotations

import json
import os
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from omni_npu_phase.commands import console

EPILOG = "Exit status: 0 measured; 2 it could not be, with the reason. No time fails it."
ROWS = (1, 64, 256)
MIXED_ROWS = (64,)
PROFILED_STEPS = 200
_HEADERS = ("updates", "hook", "mix", "rows", "released us", "mixin us", "ratio", "spread", "operations")


class HookOption(str, Enum):
    batched = "batched"
    scalar = "scalar"


class MixOption(str, Enum):
    decode = "decode"
    mixed = "mixed"


class UpdatesOption(str, Enum):
    qwen3_tts = "qwen3-tts"
    moss_tts = "moss-tts"
    personaplex = "personaplex"
    toy = "toy"


def bench(
    rows: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            max=4096,
            help="Decode rows of a step; may be repeated. 1, 64 and 256; in mixed steps 64.",
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(metavar="N", min=1, max=16384, help="Width of an embedding.")] = 2048,
    hook: Annotated[list[HookOption] | None, typer.Option(help="May be repeated; both when left out.")] = None,
    mix: Annotated[
        list[MixOption] | None,
        typer.Option(
            help="Decode rows alone, or with a prompt chunk of 512 tokens in their middle. Both when left out."
        ),
    ] = None,
    updates: Annotated[
        list[UpdatesOption] | None,
        typer.Option(
            help="Whose hooks: a talker's of vLLM-Omni, or a toy's. May be repeated; all of them when left out."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw ratios against rows, as PNG or SVG.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Time one case on the mixin alone, and write cProfile's statistics of as many steps."
        ),
    ] = None,
) -> None:
    """Time a step of the installed runner, as released beside the same with the mixin.

    They take turns in one process, on the CPU. Runners, hooks, input batch and buffers are real; weights are invented,
    and MTP is a stand-in. Times are processor time of one thread, that of hooks and MTP left out.
    """
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        console.stop(f"--plot {plot}: a name that ends in .png or .svg")
    if plot is not None and not plot.absolute().parent.is_dir():
        console.stop(f"--plot {plot}: no such folder")
    for name in ("VLLM_LOGGING_LEVEL", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(name, "error" if name.startswith("T") else "ERROR")
    from omni_npu_phase.conformance import verify

    try:
        released = verify.load_runner("gpu-v1")
        mixed = verify.classes_for("mixin", released)
    except (verify.NoRuntimeError, RuntimeError) as error:
        console.stop(str(error))
    from omni_npu_phase.bench import models, timing
    from omni_npu_phase.bench.steps import Case

    if plot is not None:
        try:
            from omni_npu_phase.bench import picture
        except ImportError as error:
            console.stop(f"--plot needs {error.name}; pip install {error.name}")
    known = models.available()
    for each in updates or ():
        if each.value not in known:
            console.stop(f"--updates {each.value}: the installed vLLM-Omni has no such model")
    cases = [
        Case(count, hidden, own_hook.value, own_mix.value, own_updates.value)
        for own_updates, own_hook, own_mix in product(updates or UpdatesOption, hook or HookOption, mix or MixOption)
        if own_updates.value in known and own_hook.value in models.HOOKS[own_updates.value]
        for count in sorted(set(rows or (ROWS if own_mix is MixOption.decode else MIXED_ROWS)))
    ]
    if any(case.updates == UpdatesOption.qwen3_tts.value for case in cases):
        from omni_npu_phase.speech import tiny_qwen3_tts

        try:
            tiny_qwen3_tts.cached()
        except RuntimeError as error:
            console.stop(f"--updates qwen3-tts: {error}")
    if profile is not None:
        if len(cases) != 1:
            console.stop(f"--profile: one case, not {len(cases)}; name it by --rows, --hook, --mix and --updates")
        times = sorted(timing.profile(mixed.autoregressive, cases[0], PROFILED_STEPS, profile))
        low, median, high = (times[len(times) * tenth // 10] for tenth in (1, 5, 9))
        console.write_text(f"{median:.0f} us a step ({low:.0f} to {high:.0f}), hooks and MTP left out\n", None)
        return
    results = []
    with console.progress() as say:
        for number, case in enumerate(cases, 1):
            say(f"{number} of {len(cases)}: {case.hook} hook, {case.mix}, {case.updates}, {case.rows} rows")
            results.append(timing.measure(released.autoregressive, mixed.autoregressive, case))
    if plot is not None:
        console.write_whole(plot, lambda part: picture.draw(results, part))
    runtime = verify.describe_runtime(mixed, "cpu")
    if as_json:
        own = {"runtime": runtime, "fits": _fits(results), "results": [result.as_dict() for result in results]}
        console.write_text(json.dumps(own, indent=1) + "\n", None)
    else:
        console.write([*_tables(results), *_lines(results)], None)


def _tables(results: list[Any]) -> list[Table]:
    """One of models' own hooks, one of the toy's."""
    tables = []
    for title, toys in (("Hooks of vLLM-Omni's models", False), ("Synthetic hooks", True)):
        own = [each for each in results if (each.updates == UpdatesOption.toy.value) is toys]
        if own:
            tables.append(table := Table(title=title, title_justify="left"))
            for header in _HEADERS:
                table.add_column(header, justify="left" if header in _HEADERS[:3] else "right")
            for each in own:
                table.add_row(
                    *(each.updates, each.hook, each.mix, str(each.rows)),
                    *(f"{each.released_us:.0f}", f"{each.mixin_us:.0f}", f"{each.ratio:.2f}"),
                    f"{each.ratio_min:.2f} to {each.ratio_max:.2f}",
                    f"{each.released_operations} / {each.operations}",
                )
    return tables


def _fits(results: list[Any]) -> list[dict[str, Any]]:
    """Microseconds a row and fixed, for each kind of step that was measured with several numbers of rows."""
    from omni_npu_phase.bench.timing import fit

    fits = []
    for kind in dict.fromkeys((each.hook, each.mix, each.updates) for each in results):
        own = [each for each in results if (each.hook, each.mix, each.updates) == kind]
        theirs, ours = fit(own, lambda each: each.released_us), fit(own, lambda each: each.mixin_us)
        if theirs is not None and ours is not None:
            fits.append(
                {
                    **dict(zip(("hook", "mix", "updates"), kind, strict=True)),
                    "released": {"fixed_us": theirs.fixed_us, "row_us": theirs.row_us},
                    "mixin": {"fixed_us": ours.fixed_us, "row_us": ours.row_us},
                }
            )
    return fits


def _lines(results: list[Any]) -> list[str]:
    lines = [
        "Processor time of one step up to the model forward, hooks and MTP left out.",
        "Spread: tenth to ninetieth percentile. Operations: released / mixin, views left out.",
    ]
    for each in _fits(results):
        parts = [f"{name} {each[name]['fixed_us']:.0f} us and {each[name]['row_us']:.2f} us a row" for name in _SIDES]
        lines.append(f"{each['updates']}, {each['hook']} hook, {each['mix']}: {'; '.join(parts)}")
    return lines


_SIDES = ("released", "mixin")
