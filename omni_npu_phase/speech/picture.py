# SPDX-License-Identifier: Apache-2.0
"""One picture of a validation: every row over the steps, coloured by phase, and what was heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from omni_npu_phase.speech.report import Comparison, Report
from omni_npu_phase.tracing.picture import draw_rows, legend


def draw(report: Report, path: Path) -> None:
    """Write the picture as PNG: a line of three panels for each prompt."""
    count = len(report.comparisons)
    figure = Figure(figsize=(15, 0.9 + 2.9 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.verdict}: {report.summary().splitlines()[0].partition(': ')[2]}", fontsize=13)
    panels = figure.subplots(count, 3, squeeze=False, gridspec_kw={"width_ratios": (1, 1, 1.6)})
    for index, (comparison, (left, middle, right)) in enumerate(zip(report.comparisons, panels, strict=True), 1):
        title = f"{index}: “{comparison.prompt.text}”, chunked, {comparison.budget} tokens a step"
        draw_rows(left, comparison.chunked.rows, title)
        draw_rows(middle, comparison.unchunked.rows, "unchunked")
        _waveforms(right, comparison)
    figure.legend(handles=legend(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)


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
