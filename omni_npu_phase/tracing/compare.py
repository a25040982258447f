# SPDX-License-Identifier: Apache-2.0
"""Two traces held against each other: the first step at which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from omni_npu_phase.tracing.schema import COLUMNS, Header, Row, Step, Trace, TraceError, find


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two traces first differ; ``rows`` are lines to read, one trace's above the other's."""

    step: int
    what: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two traces, the steps that are the same from the first on, and what comes then: None for the end of both."""

    files: tuple[str, str]
    same_steps: int
    same_rows: int
    difference: Difference | None
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The comparison to be read."""
        files = f"{self.files[0]} and {self.files[1]}"
        if self.difference is None:
            return [f"{files}: the same in {self.same_steps} steps, {self.same_rows} rows", *self.notes]
        where = f"{files}: {self.same_steps} steps are the same, then step {self.difference.step}"
        return [f"{where}: {self.difference.what}", *(f"  {row}" for row in self.difference.rows), *self.notes]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.difference is None}


def pairs(path: Path, other: Path | None) -> list[tuple[Trace, Trace]]:
    """Traces to compare: the ranks of each replica in a folder, or two files, or what two folders hold of each rank.

    Raises :class:`TraceError` where nothing matches, or more than one file is of the same rank.
    """
    if other is None:
        if not path.is_dir():
            raise TraceError(f"{path} is one trace: name another, or a folder of ranks")
        ranks = _by_rank(path, find(path))
        groups: dict[tuple[int, ...], list[Trace]] = {}
        for trace in ranks.values():
            header = trace.header
            groups.setdefault((header.stage, header.replica, header.dp), []).append(trace)
        found = [(group[0], each) for group in groups.values() for each in group[1:]]
        if not found:
            raise TraceError(f"{path} holds no two ranks of one replica of a stage")
        return found
    left, right = find(path), find(other)
    if len(left) == len(right) == 1:
        return [(left[0], right[0])]
    one, two = _by_rank(path, left), _by_rank(other, right)
    if one.keys() != two.keys():
        lone = sorted(trace.header.title for rank, trace in {**one, **two}.items() if (rank in one) != (rank in two))
        raise TraceError(f"only one of {path} and {other} has {', '.join(lone)}")
    return [(one[rank], two[rank]) for rank in one]


def _by_rank(path: Path, traces: Sequence[Trace]) -> dict[tuple[int, ...], Trace]:
    found: dict[tuple[int, ...], Trace] = {}
    for trace in traces:
        header = trace.header
        rank = (header.stage, header.replica, header.dp, header.pp, header.tp)
        if rank in found:
            twice = f"{found[rank].path.name} and {trace.path.name}"
            raise TraceError(f"{path} holds two traces of {header.title}, {twice}: keep one run in a folder")
        found[rank] = trace
    return found


def compare(one: Trace, two: Trace) -> Comparison:
    """The first difference between two traces, in what is recorded of both.

    Times are not compared. Where the traces share no request, requests are matched by the order in which they appear.
    """
    columns, notes = _columns(one.header, two.header)
    by_order = not _requests(one) & _requests(two)
    if by_order:
        notes.append("the traces share no request id: requests are matched by the order in which they appear")
    orders: tuple[dict[str, int], dict[str, int]] = {}, {}
    steps = rows = 0
    difference = None
    for left, right in zip_longest(one.steps(), two.steps()):
        keys = [
            _keys(step, columns, order if by_order else None) for step, order in zip((left, right), orders, strict=True)
        ]
        difference = _difference(left, right, *keys)
        if difference is not None:
            break
        steps, rows = steps + 1, rows + len(left.rows)
    return Comparison((one.path.name, two.path.name), steps, rows, difference, (*notes, *one.notes, *two.notes))


def _columns(one: Header, two: Header) -> tuple[list[str], list[str]]:
    """What is compared, and why the rest is not."""
    left_out = []
    if one.hooks != two.hooks:
        left_out = ["call", "entry", "told"]
    elif one.mixin != two.mixin and not one.hooks:
        left_out = ["told"]
    notes = [f"not recorded in both, and not compared: {', '.join(left_out)}"] if left_out else []
    return [name for name in COLUMNS if name not in left_out], notes


def _requests(trace: Trace) -> set[str]:
    return {row.request for step in trace.steps() for row in step.rows}


def _keys(step: Step | None, columns: Sequence[str], order: dict[str, int] | None) -> list[dict[str, Any]]:
    """Each row's compared values by name; requests as numbers in order of appearance where ``order`` is kept."""
    found = []
    for row in [] if step is None else step.rows:
        values = {name: value for name, value in row.named.items() if name in columns}
        if order is not None:
            values["request"] = order.setdefault(row.request, len(order))
        found.append(values)
    return found


def _difference(
    left: Step | None, right: Step | None, one: list[dict[str, Any]], two: list[dict[str, Any]]
) -> Difference | None:
    if left is None or right is None:
        step, which = (right, "second") if left is None else (left, "first")
        assert step is not None
        return Difference(step.number, f"only the {which} trace goes on", _texts(left, right, 0))
    for index, (own, other) in enumerate(zip_longest(one, two)):
        if own is None or other is None:
            which = "second" if own is None else "first"
            return Difference(left.number, f"only the {which} trace has row {index}", _texts(left, right, index))
        names = [name for name, value in own.items() if value != other[name]]
        if names:
            told = ", ".join(f"{name} {own[name]} / {other[name]}" for name in names)
            return Difference(left.number, f"row {index} differs in {told}", _texts(left, right, index))
    for name in ("number", "error", "strays"):
        own, other = getattr(left, name), getattr(right, name)
        if own != other:
            return Difference(left.number, f"{name}: {own} / {other}", ())
    return None


def _texts(left: Step | None, right: Step | None, index: int) -> tuple[str, ...]:
    texts = []
    for step in (left, right):
        has = step is not None and index < len(step.rows)
        texts.append(row_text(step.rows[index]) if step is not None and has else "nothing")
    return tuple(texts)


def row_text(row: Row) -> str:
    """A row on one line."""
    marks = [name for name, there in (("crosses", row.crosses), ("replay", row.replay)) if there]
    parts = [f"{row} at {row.at} {row.phase}", *marks, f"hook {row.hook}"]
    if row.call is not None:
        parts[-1] += f" (call {row.call})"
    parts.append("no MTP" if row.mtp is None else f"MTP {row.mtp}")
    if row.told is not None:
        parts.append(f"told {row.told}")
    return ", ".join(parts)
