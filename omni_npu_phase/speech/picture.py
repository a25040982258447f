# SPDX-License-Identifier: Apache-2.0
"""One picture of a validation: every row over the steps, coloured by phase, and what was heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from omni_npu_phase.speech.observe import Request
from omni_npu_phase.speech.report import Comparison, Report

PREFILL, TAIL, DECODE, MTP = "#3b6ea8", "#d1495b", "#edae49", "#222222"
SHOWN_DECODES = 12
"""Decode steps shown after the prompt: the rest look the same."""


def draw(report: Report, path: Path) -> None:
    """Write the picture as PNG: a line of three panels for each prompt."""
    count = len(report.comparisons)
    figure = Figure(figsize=(15, 0.9 + 2.9 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.verdict}: {report.summary().splitlines()[0].partition(': ')[2]}", fontsize=13)
    panels = figure.subplots(count, 3, squeeze=False, gridspec_kw={"width_ratios": (1, 1, 1.6)})
    for index, (comparison, (left, middle, right)) in enumerate(zip(report.comparisons, panels, strict=True), 1):
        _rows(
            left, comparison.chunked, f"{index}: “{comparison.prompt.text}”, chunked, {comparison.budget} tokens a step"
        )
        _rows(middle, comparison.unchunked, "unchunked")
        _waveforms(right, comparison)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)


def _legend() -> list[Any]:
    return [
        Patch(color=PREFILL, label="prefill row"),
        Patch(color=TAIL, label="one-token prefill tail"),
        Patch(color=DECODE, label="decode row"),
        Line2D([], [], color=MTP, marker="o", linestyle="", markersize=4, label="MTP made a frame of it"),
        Line2D([], [], color="grey", linestyle="--", label="end of the prompt"),
    ]


def _rows(panel: Any, request: Request, title: str) -> None:
    prompt_rows = sum(row.prefill for row in request.rows)
    shown = request.rows[: prompt_rows + SHOWN_DECODES]
    for step, row in enumerate(shown):
        colour = TAIL if row.tail else PREFILL if row.prefill else DECODE
        panel.bar(step, row.span, bottom=row.computed, width=0.9, color=colour)
        middle = row.computed + row.span / 2
        if row.tail:
            panel.annotate(
                f"tail\nC={row.computed} S=1", (step, middle), xytext=(-8, 18), textcoords="offset points",
                color=TAIL, ha="right", fontsize=9, arrowprops={"arrowstyle": "->", "color": TAIL},
            )  # fmt: skip
        if row.seen_by_mtp:
            panel.plot(step, middle, marker="o", color=MTP, markersize=3)
    panel.axhline(request.prompt_len, color="grey", linestyle="--", linewidth=1)
    panel.text(
        len(shown) - 0.5, request.prompt_len - 0.5, f"P={request.prompt_len}", ha="right", va="top", color="grey"
    )
    panel.set_title(title, loc="left", fontsize=10)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("step")
    panel.set_ylabel("position")
    panel.set_xlim(-0.7, max(len(shown), 8) - 0.3)


def _waveforms(panel: Any, comparison: Comparison) -> None:
    speeches = (
        ("chunked", comparison.chunked_speech, "#444444"),
        ("unchunked", comparison.unchunked_speech, "#888888"),
    )
    for place, (name, speech, colour) in zip((1.1, -1.1), speeches, strict=True):
        seconds = np.arange(speech.audio.size) / (speech.sample_rate or 1)
        panel.plot(seconds, place + np.nan_to_num(speech.audio), color=colour, linewidth=0.4, label=name)
    difference = comparison.audio_difference
    told = "other length" if difference is None else f"largest difference {difference:.1e}"
    codes = "codes equal" if comparison.codes_equal else "codes differ"
    panel.set_title(f"frames: {comparison.frames}; {codes}; audio: {told}", loc="left", fontsize=10)
    panel.set_yticks((1.1, -1.1), ("chunked", "unchunked"))
    panel.set_ylim(-2.3, 2.3)
    panel.set_xlabel("seconds")
