# SPDX-License-Identifier: Apache-2.0
"""Rows over the steps as a picture: one bar a row, from its progress up, coloured by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from omni_npu_phase import contract

PREFILL, TAIL, DECODE, MTP = "#3b6ea8", "#d1495b", "#edae49", "#222222"
SHOWN_DECODES = 12
"""Decode steps shown after the prompt: the rest look the same."""
_COLUMNS = 3


class Row(Protocol):
    """What is drawn of a request in a step."""

    @property
    def lengths(self) -> contract.Row: ...
    @property
    def seen_by_mtp(self) -> bool: ...


def draw(requests: Mapping[str, Sequence[Row]], path: Path, title: str) -> None:
    """Write a picture with one panel a request as PNG."""
    columns = min(_COLUMNS, len(requests))
    lines = -(-len(requests) // columns)
    figure = Figure(figsize=(1 + 4.7 * columns, 0.9 + 2.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, (request, rows) in zip(panels, requests.items(), strict=False):
        draw_rows(panel, rows, request)
    for panel in panels[len(requests) :]:
        panel.set_axis_off()
    figure.legend(handles=legend(), loc="outside lower center", ncols=5 if columns > 1 else 2, frameon=False)
    figure.savefig(path, dpi=110, format="png")


def legend() -> list[Any]:
    """Handles that say what the colours mean."""
    return [
        Patch(color=PREFILL, label="prefill row"),
        Patch(color=TAIL, label="one-token prefill tail"),
        Patch(color=DECODE, label="decode row"),
        Line2D([], [], color=MTP, marker="o", linestyle="", markersize=4, label="MTP made a frame of it"),
        Line2D([], [], color="grey", linestyle="--", label="end of the prompt"),
    ]


def draw_rows(panel: Any, rows: Sequence[Row], title: str) -> None:
    """Draw one request's rows, its prompt's and :data:`SHOWN_DECODES` more, into a panel of matplotlib."""
    prompt_rows = sum(row.lengths.prefill for row in rows)
    shown = rows[: prompt_rows + SHOWN_DECODES]
    for step, row in enumerate(shown):
        lengths = row.lengths
        colour = TAIL if lengths.tail else PREFILL if lengths.prefill else DECODE
        panel.bar(step, lengths.span, bottom=lengths.num_computed, width=0.9, color=colour)
        middle = lengths.num_computed + lengths.span / 2
        if lengths.tail:
            panel.annotate(
                f"tail\nC={lengths.num_computed} S=1", (step, middle), xytext=(-8, 18), textcoords="offset points",
                color=TAIL, ha="right", fontsize=9, arrowprops={"arrowstyle": "->", "color": TAIL},
            )  # fmt: skip
        if row.seen_by_mtp:
            panel.plot(step, middle, marker="o", color=MTP, markersize=3)
    prompt_len = rows[0].lengths.prompt_len
    panel.axhline(prompt_len, color="grey", linestyle="--", linewidth=1)
    panel.text(len(shown) - 0.5, prompt_len - 0.5, f"P={prompt_len}", ha="right", va="top", color="grey")
    panel.set_title(title, loc="left", fontsize=10)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("step")
    panel.set_ylabel("position")
    panel.set_xlim(-0.7, max(len(shown), 8) - 0.3)
