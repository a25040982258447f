# SPDX-License-Identifier: Apache-2.0
"""The rows for which hooks are walked, and what the walks of one hook saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omni_npu_phase import contract
from omni_npu_phase.lint.values import Key, Place, Value


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a step as the runner schedules it."""

    name: str
    prompt_len: int
    num_computed: int
    span: int

    @property
    def is_prefill(self) -> bool:
        return contract.is_prefill(self.prompt_len, self.num_computed)

    @property
    def fields(self) -> Mapping[str, int | bool]:
        values = (self.prompt_len, self.num_computed, self.is_prefill)
        return dict(zip(contract.FIELDS, values, strict=True))


CHUNK, MIDDLE, LAST = Row("chunk", 9, 0, 4), Row("middle", 9, 4, 4), Row("last", 9, 5, 4)
CROSSING = Row("crossing", 9, 4, 8)
WHOLE = Row("whole", 9, 0, 9)
TAIL = Row("tail", 9, 8, 1)
DECODE, LONG_DECODE = Row("decode", 9, 9, 1), Row("long decode", 9, 9, 2)
ROWS = (CHUNK, MIDDLE, LAST, CROSSING, WHOLE, TAIL, DECODE, LONG_DECODE)


@dataclass(slots=True)
class Test:
    """A test that chooses what a hook does, and what it gave for each row; None where that is unknown."""

    place: Place
    touches: tuple[bool, bool]
    """Whether the hook does something where the test fails, and where it holds."""
    followed: bool = True
    """Whether it is seen what the test chooses. A value that leaves the walk may choose anything."""
    outcomes: dict[str, bool | int | str | None] = field(default_factory=dict)
    """By the row's name; where one of several things is chosen by its name or number, that."""
    mixed: bool = False
    """Whether it gave several outcomes for one row, in a loop."""
    made_of: list[Value] = field(default_factory=list)
    """What was tested, where the outcome is unknown."""

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
    broken: set[str] = field(default_factory=set)
    """Rows for which the walk came to no end."""
    stored: set[str] = field(default_factory=set)
    """Names under which it keeps anything."""
