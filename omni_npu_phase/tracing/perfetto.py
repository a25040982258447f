# SPDX-License-Identifier: Apache-2.0
"""A trace in the JSON trace event format of Chrome and Perfetto: a process for each file, a track for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omni_npu_phase.tracing.schema import Row, Trace

_STEPS = 1
"""Track of the steps; requests follow."""


def events(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    """Metadata and complete events; times in microseconds, a slice as long as the runner prepared its step."""
    for process, trace in enumerate(traces, 1):
        header = trace.header
        yield _name("process_name", process, 0, f"{header.title}, {header.model} (pid {header.pid})")
        yield _name("thread_name", process, _STEPS, "steps")
        tracks: dict[str, int] = {}
        for step in trace.steps():
            # What takes no time would not be drawn.
            took = {"ts": step.time, "dur": max(step.took, 1)}
            spans = {"tokens": sum(row.span for row in step.rows), "rows": len(step.rows)}
            about = {**spans, **({} if step.error is None else {"error": step.error})}
            yield {**_slice(process, _STEPS, f"step {step.number}", "step"), **took, "args": about}
            for row in step.rows:
                if row.request not in tracks:
                    tracks[row.request] = _STEPS + 1 + len(tracks)
                    yield _name("thread_name", process, tracks[row.request], row.request)
                name = f"{row.phase}, MTP" if row.seen_by_mtp else row.phase
                yield {
                    **_slice(process, tracks[row.request], name, "row"),
                    **took,
                    "args": {"step": step.number, **_about(row)},
                }


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slice(process: int, track: int, name: str, category: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": track}


def _about(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.named.items() if value is not None and name != "request"}
