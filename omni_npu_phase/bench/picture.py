# SPDX-License-Identifier: Apache-2.0
"""One picture of a bench: how many times as long the released runner takes, against decode rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from omni_npu_phase.bench.timing import Result

COLOURS = {"qwen3-tts": "#3b6ea8", "moss-tts": "#d1495b", "personaplex": "#2e8b57", "toy": "#888888"}
LINES = {"batched": "-", "scalar": "--"}


def kind_of(result: Result) -> tuple[str, str, str]:
    """What all results of a line have in common."""
    return result.updates, result.hook, result.mix


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the picture; the format is that of the path's suffix. Raises ValueError for one that is unknown."""
    kinds = [(kind, list(group)) for kind, group in groupby(results, key=kind_of)]
    # One point is no line; it is drawn only where there is nothing else.
    lines = [(kind, group) for kind, group in kinds if len(group) > 1] or kinds
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for kind, group in lines:
        rows, ratios = [result.rows for result in group], [result.ratio for result in group]
        updates, hook, _ = kind
        panel.plot(rows, ratios, LINES[hook], marker="o", color=COLOURS[updates], label=", ".join(kind))
    panel.axhline(1, color="#cccccc", zorder=0)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted({result.rows for result in results}), minor=False)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set_xlabel("decode rows")
    panel.set_ylabel("time of the released runner / with the mixin")
    panel.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=110)
