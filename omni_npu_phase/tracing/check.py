# SPDX-License-Identifier: Apache-2.0
"""Every clause that a trace alone can show, held against a trace.

What lies in buffers and what hooks return is not in a trace; ``verify`` judges those clauses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omni_npu_phase import contract
from omni_npu_phase.releases import v2
from omni_npu_phase.tracing.schema import BATCHED, FILLED, MTP, SCALAR, Header, Row, Step, Trace

SCHEMA = "omni-npu-phase/trace-check/1"
SHOWN = (
    *("M1", "M2", "M3", "M4", "M5", "M7", "M8"),
    *("R1", "R2", "R3", "R4", "R5"),
    *("T1", "T2", "T3", "T4", "T6", "T7"),
    *("E2", "E3", "E4"),
)
"""Clauses that a trace can show. M1, M7 and the order of calls need every hook call to be recorded."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a clause; ``request`` is None where it is about the step."""

    clause: str
    file: str
    step: int
    request: str | None
    seen: str

    def __str__(self) -> str:
        return f"[{self.clause}] {self.file}, step {self.step}: {self.seen}"


@dataclass(slots=True)
class Check:
    """What traces show: how often each clause was judged, and every breach."""

    judged: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0

    @property
    def holds(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "holds": self.holds,
            "files": self.files,
            "steps": self.steps,
            "judged": {clause: self.judged[clause] for clause in SHOWN},
            "findings": [asdict(finding) for finding in self.findings],
            "notes": self.notes,
        }


def check(traces: Sequence[Trace]) -> Check:
    """Judge traces, each by itself. Raises :class:`~omni_npu_phase.tracing.schema.TraceError` for a damaged one."""
    result = Check()
    for trace in traces:
        result.files.append(trace.path.name)
        judge = _Judge(trace.header)
        for step in trace.steps():
            result.steps += 1
            for clause, row, seen in judge.step(step):
                result.judged[clause] += 1
                if seen:
                    request = None if row is None else row.request
                    result.findings.append(Finding(clause, trace.path.name, step.number, request, seen))
        result.notes += trace.notes
    return result


_Finding = tuple[str, Row | None, str]
"""Clause, row or None for the whole step, and what is wrong; empty where it holds."""


@dataclass(frozen=True, slots=True)
class _Earlier:
    """The last row of a request."""

    step: int
    row: Row


class _Judge:
    """Goes through one trace; keeps the last row of every request."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._earlier: dict[str, _Earlier] = {}

    def step(self, step: Step) -> Iterator[_Finding]:
        rows = [row for row in step.rows if not row.request.startswith(v2.WARMUP)]
        yield from _refusals(step, rows)
        # What an error leaves undone is nobody's breach.
        if step.error is None:
            if not self._header.preprocess:
                used = any(row.hook or row.seen_by_mtp for row in rows) or bool(step.strays)
                yield "R1", None, "a hook or MTP was called for a model without hooks" if used else ""
            else:
                yield from self._progress(step, rows)
                # Of a row with something given back, hooks and MTP see the new part (X1, X2).
                new = [part for row in rows if (part := row.new) is not None]
                yield from self._fields(new)
                yield from self._hooks(step, new)
                if self._header.mtp:
                    yield from self._mtp(step, new)
        self._earlier.update({row.request: _Earlier(step.number, row) for row in rows})

    def _progress(self, step: Step, rows: Sequence[Row]) -> Iterator[_Finding]:
        for row in rows:
            earlier = self._earlier.get(row.request)
            # A prefill row may be of another request with the same id, whose prompt begins in a cache; and who was away
            # may come back further on.
            if earlier is not None and earlier.step == step.number - 1 and row.lengths.decode:
                reached = earlier.row.lengths.end
                jumps = row.num_computed > reached
                yield "M4", row, f"{row}: its progress jumps from {reached} to {row.num_computed}" if jumps else ""

    def _fields(self, rows: Sequence[Row]) -> Iterator[_Finding]:
        for row in rows:
            if row.told is None:
                continue
            prompt_len, computed, prefill = row.told
            lacks = [name for name, value in zip(contract.FIELDS, row.told, strict=True) if value is None]
            yield "M1", row, f"{row} was not told {', '.join(lacks)}" if lacks else ""
            odd = [
                f"{name} is {value if isinstance(value, str) else type(value).__name__}"
                for (name, kind), value in zip(contract.FIELD_TYPES.items(), row.told, strict=True)
                if value is not None and type(value) is not kind
            ]
            yield "M2", row, f"{row}: {odd[0]}" if odd else ""
            told = f"{row} was told P={prompt_len} C={computed} prefill={prefill}"
            # Of a value of another type nothing more is known.
            yield "M3", row, told if prompt_len != row.prompt_len and not isinstance(prompt_len, str) else ""
            yield "M4", row, told if computed != row.num_computed and not isinstance(computed, str) else ""
            wrong = told if prefill != row.lengths.prefill and not isinstance(prefill, str) else ""
            earlier = self._earlier.get(row.request)
            if earlier is not None and earlier.row.lengths.prefill is not row.lengths.prefill:
                # The phase has just changed: a latched one shows here.
                yield "M8", row, wrong
            yield "M5", row, wrong
            if row.prompt_len == row.span == 1 and row.num_computed == 0:
                yield "T3", row, wrong
            if row.crosses:
                yield "E2", row, wrong
            if row.replay:
                yield "E3", row, wrong

    def _hooks(self, step: Step, rows: Sequence[Row]) -> Iterator[_Finding]:
        known = {row.request for row in rows}
        for stray in step.strays:
            if stray.what != MTP:
                again = stray.request in known
                clause, what = ("M1", "got another") if again else ("R3", "is no row of the step, but got a")
                yield clause, None, f"{stray.request} {what} {stray.what} hook call"
        for row in rows:
            if self._header.hooks:
                yield "M1", row, f"{row} got no hook call" if row.hook is None else ""
            if row.hook in (None, FILLED):
                continue
            if row.hook == BATCHED:
                yield "R2", row, "" if row.lengths.eligible else f"{row} is {_kind(row)} and went to the batched hook"
            elif self._header.batched:
                yield "R2", row, ""
            if row.lengths.eligible and self._header.batched:
                clause = "R5" if self._header.mtp else "R4"
                yield (
                    clause,
                    row,
                    f"{row} is a one-token decode row and went to scalar preprocess" * (row.hook == SCALAR),
                )
        yield from self._call_order(rows)

    def _call_order(self, rows: Sequence[Row]) -> Iterator[_Finding]:
        by_call: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.call is not None:
                by_call.setdefault(row.call, []).append(index)
        for indices in by_call.values():
            if rows[indices[0]].hook == BATCHED:
                names = [rows[index].request for index in sorted(indices, key=lambda index: rows[index].entry or 0)]
                swapped = names != [rows[index].request for index in indices]
                listing = f"a batched call has its entries in another order than the rows': {', '.join(names)}"
                yield "R3", rows[indices[0]], listing if swapped else ""
        if not self._header.mtp and not self._header.gathers:
            for indices in by_call.values():
                offsets = [rows[index].at for index in indices]
                if rows[indices[0]].hook == BATCHED:
                    apart = offsets != list(range(offsets[0], offsets[0] + len(offsets)))
                    yield "R4", rows[indices[0]], f"one batched call took offsets {offsets}" if apart else ""
            if self._header.hooks and by_call:
                first = [by_call[number][0] for number in sorted(by_call)]
                late = first != sorted(first)
                yield "R4", None, "a batch was flushed after a later span" if late else ""
        if self._header.hooks:
            for hook in (SCALAR, BATCHED):
                order = [row.call for row in rows if row.hook == hook and row.call is not None]
                if len(order) > 1:
                    swapped = order != sorted(order)
                    yield "M7", None, f"{hook} hooks were called in another order than the rows'" if swapped else ""

    def _mtp(self, step: Step, rows: Sequence[Row]) -> Iterator[_Finding]:
        for stray in step.strays:
            if stray.what == MTP:
                again = any(row.request == stray.request for row in rows)
                what = "is in the MTP batch twice" if again else "is in the MTP batch and no row of the step"
                yield "T1", None, f"{stray.request} {what}"
        inside = [row for row in rows if row.seen_by_mtp]
        for row in rows:
            wrong = f"{row} is {_kind(row)} and went to MTP" if row.seen_by_mtp else ""
            if row.lengths.prefill:
                if row.span == 1 or wrong:
                    yield "T2", row, wrong
                if row.prompt_len == row.span == 1:
                    yield "T3", row, wrong
                if row.crosses:
                    yield "E2", row, wrong
            elif not row.lengths.eligible:
                yield "T6", row, wrong
            elif row.seen_by_mtp:
                astray = row.mtp_at is not None and row.mtp_at != row.at
                yield "T4", row, f"{row} lies at {row.at}, MTP was given {row.mtp_at} for it" if astray else ""
            elif row.hook not in (None, FILLED):
                why = " (unless its hook gave no mtp_inputs: E7)" if row.hook == SCALAR else ""
                yield "T4", row, f"{row} was left out of MTP{why}"
        if inside:
            positions = [row.mtp for row in inside]
            ordered = positions == list(range(len(inside)))
            listing = ", ".join(f"{row.request} at {row.mtp}" for row in inside)
            yield "T1", None, "" if ordered else f"the MTP batch is not in row order: {listing}"
        if rows and not any(row.lengths.eligible for row in rows):
            yield "T7", None, "MTP was called in a step without eligible rows" if inside else ""


def _refusals(step: Step, rows: Sequence[Row]) -> Iterator[_Finding]:
    """Impossible lengths, which must have ended the step (E4)."""
    refused = step.error is not None
    for row in rows:
        impossible = min(row.prompt_len, row.num_computed, row.span, row.at) < 0 or row.at + row.span > step.buffer
        if impossible:
            where = f"{row} at {row.at} of {step.buffer} buffer rows"
            yield "E4", row, "" if refused else f"{where} went through the step"
        else:
            yield "E4", row, ""


def _kind(row: Row) -> str:
    return row.phase if row.lengths.prefill else f"decode of {row.span} tokens"
