# SPDX-License-Identifier: Apache-2.0
"""Traces in the JSON trace event format of Chrome and Perfetto: a process for each file, a track for each request.

One more process shows which stage is late: for each request and stage, how long it waited for the stage's first step,
and how long the stage had it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omni_npu_phase.tracing.schema import Row, Trace

_Stays = dict[str, dict[tuple[int, int, int], list[tuple[int, int]]]]
"""For each request and engine (stage, replica, DP rank), the begin and end of its steps there."""
_STEPS = 1
"""Track of the steps; requests follow."""


def events(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    """Metadata and complete events; times in microseconds, a slice as long as the runner prepared its step."""
    stays: _Stays = {}
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
                own = stays.setdefault(row.request, {}).setdefault((header.stage, header.replica, header.dp), [])
                waited = {"waited": step.time - own[-1][1]} if own else {}
                own.append((step.time, step.time + step.took))
                name = f"{row.phase}, MTP" if row.seen_by_mtp else row.phase
                yield {
                    **_slice(process, tracks[row.request], name, "row"),
                    **took,
                    "args": {"step": step.number, **waited, **_about(row)},
                }
    yield from _stages(stays, len(traces) + 1)


def _stages(stays: _Stays, process: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", process, 0, "requests by stage")
    track = 0
    for request, engines in stays.items():
        for engine, steps in sorted(engines.items()):
            track += 1
            first, last = min(steps)[0], max(end for _, end in steps)
            where = f"stage {engine[0]} replica {engine[1]}"
            yield _name("thread_name", process, track, f"{request}, {where}")
            # What came before: the last step of another stage that had ended by then.
            ends = [end for other in engines if other[0] < engine[0] for _, end in engines[other] if end <= first]
            if ends:
                waits = {"ts": max(ends), "dur": max(first - max(ends), 1), "args": {"after": "the stage before"}}
                yield {**_slice(process, track, f"waits for {where}", "wait"), **waits}
            took = {"ts": first, "dur": max(last - first, 1), "args": {"steps": len(steps)}}
            yield {**_slice(process, track, where, "stage"), **took}


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slice(process: int, track: int, name: str, category: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": track}


def _about(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.named.items() if value is not None and name != "request"}
