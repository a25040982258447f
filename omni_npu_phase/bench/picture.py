# SPDX-License-Identifier: Apache-2.0
"""One picture of a bench: time against decode rows, a panel for each kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from omni_npu_phase.bench.timing import Result

RELEASED, MIXIN = "#d1495b", "#3b6ea8"


def kind_of(result: Result) -> tuple[str, str, str]:
    """What all results of a panel have in common."""
    return result.updates, result.hook, result.mix


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the picture; the format is that of the path's suffix. Raises ValueError for one that is unknown."""
    kinds = [(kind, list(group)) for kind, group in groupby(results, key=kind_of)]
    # One point is no line; it is drawn only where there is nothing else.
    panels = [(kind, group) for kind, group in kinds if len(group) > 1] or kinds
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 0.6 + 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for (kind, group), panel in zip(panels, axes, strict=False):
        rows = [result.rows for result in group]
        panel.plot(rows, [r.released_us for r in group], marker="o", color=RELEASED, label="released")
        panel.plot(rows, [r.mixin_us for r in group], marker="o", color=MIXIN, label="with the mixin")
        panel.set_title(", ".join(kind), loc="left", fontsize=10)
        panel.set_xlabel("decode rows")
        panel.set_ylabel("microseconds a step, without hooks")
        panel.set_ylim(bottom=0)
    for panel in list(axes)[len(panels) :]:
        panel.set_axis_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
