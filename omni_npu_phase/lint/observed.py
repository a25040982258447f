# SPDX-License-Identifier: Apache-2.0
"""The rows for which hooks are walked, and what the walks of one hook saw."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_npu_phase.contract import Row
from omni_npu_phase.lint.values import Key, Place, Value

CHUNK, MIDDLE, LAST, CROSSING, WHOLE = Row(9, 0, 4), Row(9, 4, 4), Row(9, 5, 4), Row(9, 4, 8), Row(9, 0, 9)
TAIL, DECODE, LONG_DECODE = Row(9, 8, 1), Row(9, 9, 1), Row(9, 9, 2)
ROWS = (CHUNK, MIDDLE, LAST, CROSSING, WHOLE, TAIL, DECODE, LONG_DECODE)

Outcome = bool | int | str | None
"""What a test gives: for a choice among several things the name or number chosen; None where it is unknown."""


@dataclass(slots=True)
class Test:
    """A test that chooses what a hook does, and what it gave for each row."""

    place: Place
    touches: tuple[bool, bool]
    """Whether the hook does something where the test fails, and where it holds."""
    followed: bool = True
    """Whether it is seen what the test chooses. A value that leaves the walk may choose anything."""
    outcomes: dict[Row, Outcome] = field(default_factory=dict)
    mixed: bool = False
    """Whether it gave several outcomes for one row, in a loop."""
    made_of: list[Value] = field(default_factory=list)
    """What was tested, where the outcome is unknown, or changes in a loop."""

    def of(self, *rows: Row) -> list[Outcome] | None:
        """The outcomes for these rows; None where one of them does not come to the test."""
        return [self.outcomes[row] for row in rows] if self.outcomes.keys() >= set(rows) else None

    @property
    def acts(self) -> bool:
        """Whether the hook does something on one of its sides."""
        return any(self.touches)


@dataclass(frozen=True, slots=True)
class Event:
    """Something a rule looks at, seen for a row. ``certain``: no unknown test stands before it."""

    kind: str
    place: Place
    row: Row
    certain: bool
    value: Value
    keys: frozenset[str] = frozenset()
    under: frozenset[Key] = frozenset()
    """The tests that lead here."""


@dataclass(slots=True)
class Observed:
    """What the walks of one hook saw."""

    tests: dict[Key, Test] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    asked: bool = False
    """Whether the hook looks for a field at all."""
    advanced: set[str] = field(default_factory=set)
    """Names under which the hook keeps something made from the span."""
    broken: set[Row] = field(default_factory=set)
    """Rows for which the walk came to no end."""
    stored: set[str] = field(default_factory=set)
    """Names under which it keeps anything."""
