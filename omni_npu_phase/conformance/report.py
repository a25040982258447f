# SPDX-License-Identifier: Apache-2.0
"""Verdicts and reports: one entry per mode and clause, as JSON, markdown, or rows for a table."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omni_npu_phase.contract import CLAUSES, REPLAY_CLAUSES, Clause

if TYPE_CHECKING:
    from omni_npu_phase.conformance.judge import Judgement

SCHEMA = "omni-npu-phase/verify/1"
Status = Literal["pass", "fail", "xfail", "not_applicable", "error"]
STATUSES: tuple[Status, ...] = ("pass", "fail", "xfail", "not_applicable", "error")


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """The verdict on one clause in one mode. ``scenarios`` are the failing ones, or all that show it."""

    mode: str
    id: str
    tier: str
    status: Status
    scenarios: tuple[str, ...]
    evidence: int
    detail: str

    @property
    def failed(self) -> bool:
        return self.status in ("fail", "error")


@dataclass(frozen=True, slots=True)
class Parity:
    """How many runs had their routing held against the scenarios' tables, and how those differ that do."""

    compared: int
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.differences:
            return f"routing is what the scenarios' tables say in all {self.compared} runs"
        return (
            f"routing differs from the scenarios' tables in {len(self.differences)} of {self.compared} runs; first: "
            + (self.differences[0])
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A verification: the runtime it ran on, every verdict, and whether the mixin routes as the tables say."""

    runtime: Mapping[str, Any]
    clauses: tuple[ClauseResult, ...]
    parity: Parity | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.mode for result in self.clauses))

    def of(self, mode: str) -> tuple[ClauseResult, ...]:
        return tuple(result for result in self.clauses if result.mode == mode)

    def summary(self) -> dict[str, dict[str, int]]:
        """Clauses by status, for each mode."""
        return {
            mode: {status: sum(result.status == status for result in self.of(mode)) for status in STATUSES}
            for mode in self.modes
        }

    def judged(self, mode: str) -> bool:
        """Whether a scenario showed any clause at all."""
        return any(result.status != "not_applicable" for result in self.of(mode))

    def passed(self, mode: str) -> bool:
        differs = mode == "mixin" and self.parity is not None and bool(self.parity.differences)
        return not differs and not any(result.failed for result in self.of(mode))

    def undecided(self, mode: str) -> str:
        """Why clauses could not be judged, where nothing else is wrong."""
        wrong = [result for result in self.of(mode) if result.failed]
        if any(result.status == "fail" for result in wrong) or (self.parity is not None and self.parity.differences):
            return ""
        return next((result.detail for result in wrong), "")

    def to_json(self) -> str:
        document = {
            "schema": SCHEMA,
            "runtime": dict(self.runtime),
            "clauses": [asdict(result) for result in self.clauses],
            "summary": self.summary(),
            "parity": None if self.parity is None else asdict(self.parity),
        }
        return json.dumps(document, indent=2) + "\n"

    def to_markdown(self) -> str:
        lines = ["# Phase contract", "", *(f"- {name}: {value}" for name, value in _flat(self.runtime))]
        for mode in self.modes:
            lines += ["", f"## {mode}: {self.counts(mode)}", "", "| clause | tier | status | scenarios | seen |"]
            lines.append("| --- | --- | --- | --- | --- |")
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in self.rows(mode)]
        if self.parity is not None:
            lines += ["", f"With the mixin, {self.parity}"]
        return "\n".join(lines) + "\n"

    def rows(self, mode: str) -> Iterator[tuple[str, str, str, str, str]]:
        """Clause, tier, status, failing scenarios and what was seen: one row per clause of a mode."""
        for result in self.of(mode):
            failing = ", ".join(result.scenarios) if result.status not in ("pass", "not_applicable") else ""
            seen = one_line(result.detail) or {**CLAUSES, **REPLAY_CLAUSES}[result.id].sentence
            yield result.id, result.tier, result.status, failing, seen

    def counts(self, mode: str) -> str:
        counts = self.summary()[mode]
        return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items() if count)


def verdict(
    mode: str,
    clause: Clause,
    judgements: Sequence[Judgement],
    xfail: str | None = None,
    note: str = "",
    absent: str = "no scenario that was run shows it",
) -> ClauseResult:
    """The verdict on a clause from all evidence for and against it; ``xfail`` is the reason of an expected failure.

    ``absent`` says why there is no evidence, where there is none.
    """
    against = [judgement for judgement in judgements if not judgement.holds]
    shown = tuple(dict.fromkeys(judgement.scenario for judgement in against or judgements))
    status: Status
    if against:
        first = next((judgement for judgement in against if not judgement.undecided), against[0])
        status = "error" if first.undecided else "fail" if xfail is None else "xfail"
        detail = f"{first.scenario} ({first.variant}): {first.seen}"
        parts = (detail, note, f"Expected: {xfail}" if xfail else "")
        detail = ". ".join(part.rstrip(".") for part in parts if part)
    elif judgements:
        status = "pass"
        detail = "" if xfail is None else f"passes, though an expected failure is listed: {xfail}"
    else:
        status, detail = "not_applicable", absent
    return ClauseResult(mode, clause.id, clause.tier, status, shown, len(judgements), detail)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, ", ".join(value) if isinstance(value, list) else str(value)


def one_line(text: str) -> str:
    """Somebody else's text, for a message or a cell: its lines put together."""
    return " ".join(filter(None, map(str.strip, text.splitlines())))


def few(failing: str) -> str:
    """Names of failing scenarios, for where there is little room."""
    names = failing.split(", ")
    return failing if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def read_xfails(path: Path | None, known: Collection[str] = CLAUSES) -> dict[str, str]:
    """:func:`parse_xfails` of a file; nothing without one. Raises ValueError also where it cannot be read."""
    if path is None:
        return {}
    try:
        return parse_xfails(path.read_text(encoding="utf-8-sig"), known)
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except OSError as error:
        raise ValueError(error.strerror) from error


def parse_xfails(text: str, known: Collection[str] = CLAUSES) -> dict[str, str]:
    """Read an expected-failures file: one ``CLAUSE: reason`` a line, ``#`` begins a comment. Raises ValueError.

    ``known``: what may be listed, if it is not clauses alone.
    """
    reasons: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        # Not within a word, as in omni#4382.
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        if not line:
            continue
        clause, _, reason = (part.strip() for part in line.partition(":"))
        if clause not in known:
            raise ValueError(f"line {number}: {clause!r} is no clause{'' if known is CLAUSES else ' and no case'}")
        if not reason:
            raise ValueError(f"line {number}: {clause} has no reason; write '{clause}: why it fails'")
        if clause in reasons:
            raise ValueError(f"line {number}: {clause} is listed twice")
        reasons[clause] = reason
    return reasons
