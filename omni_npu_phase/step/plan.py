# SPDX-License-Identifier: Apache-2.0
"""One step's rows, computed once: lengths, phases, offsets, and how rows are grouped into hook calls.

A plan is pure: it is made from lengths and offsets, holds no tensor and no runner, and is the same for every runner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import compress, pairwise
from math import inf
from operator import add, le, lt, ne
from typing import Any, NamedTuple, TypeVar

from omni_npu_phase.contract import IS_PREFILL, NUM_COMPUTED, PROMPT_LEN, ContractError

_Entry = TypeVar("_Entry")


def of_rows(rows: Sequence[int], entries: Sequence[_Entry]) -> Sequence[_Entry]:
    """The entries of rows, in their order."""
    if isinstance(rows, range) and rows.step == 1:
        return entries[rows.start : rows.stop]
    return [entries[row] for row in rows]


class Run(NamedTuple):
    """Rows of the input batch, in its order, that are routed alike.

    A batched run is one call of the batched hook: one-token decode rows, at contiguous offsets (R4) unless they were
    gathered. The rows of any other run get a scalar call each (R2).
    """

    rows: Sequence[int]
    batched: bool


@dataclass(slots=True)
class StepPlan:
    """The rows of one step in input-batch order (M7). Every list has one entry per row; counts are in tokens.

    Entries are Python ints and bools, because hooks receive them as they are (M2).
    """

    request_ids: Sequence[str]
    prompt_lens: list[int]
    num_computed: list[int]
    spans: list[int]
    offsets: list[int]
    prefill: list[bool]
    """Exactly while ``C < P`` (M5)."""
    eligible: list[bool]
    """For the MTP batch and the batched decode hook: one token, and decode (R2, T1, T6)."""

    def __len__(self) -> int:
        return len(self.request_ids)

    def write_fields(self, rows: Sequence[int], infos: Sequence[dict[str, Any]]) -> None:
        """Write the runner-owned fields of rows (M1 to M5) into the dictionaries that belong to them."""
        prompt_lens, num_computed, prefill = self.prompt_lens, self.num_computed, self.prefill
        # Called for every scalar row, where a strict zip takes longer than what is written.
        for row, info in zip(rows, infos, strict=False):
            info[PROMPT_LEN] = prompt_lens[row]
            info[NUM_COMPUTED] = num_computed[row]
            info[IS_PREFILL] = prefill[row]

    def without(self, request_ids: Collection[str]) -> StepPlan:
        """The plan of the other requests' rows."""
        rows = [row for row, request_id in enumerate(self.request_ids) if request_id not in request_ids]
        return StepPlan(*([getattr(self, each.name)[row] for row in rows] for each in fields(self)))

    def runs(self, *, batched: bool, gathered: bool = False) -> Iterator[Run]:
        """The step's rows in row order; ``batched``: whether the model has a batched decode hook (R2, R4).

        ``gathered``: that hook takes all its rows of the step at once, wherever they lie, before any other row.
        """
        takes = self.eligible if batched else [False] * len(self)
        if gathered and batched:
            for taken in (True, False):
                rows = [row for row, takes_row in enumerate(takes) if takes_row is taken]
                if rows:
                    yield Run(rows, taken)
            return
        # One value for all rows of a run: the same way, and for a batch the same distance to their offsets.
        ways = [self.offsets[row] - row if taken else None for row, taken in enumerate(takes)]
        starts = [0, *compress(range(1, len(ways)), map(ne, ways, ways[1:]))] if ways else []
        for start, stop in pairwise((*starts, len(ways))):
            yield Run(range(start, stop), takes[start])


def plan_step(
    request_ids: Sequence[str],
    prompt_lens: Sequence[int],
    num_computed: Sequence[int],
    spans: Sequence[int],
    offsets: Sequence[int],
    *,
    buffer_rows: int,
) -> StepPlan:
    """Classify every row of a step.

    All four sequences have an entry a row: Python ints, or arrays of shape (rows,) and any integer dtype. ``offsets``
    are rows of the step's input buffer, which has ``buffer_rows`` rows. Raises :class:`ContractError` (E4) for a
    negative length, a span outside the buffer, or spans that overlap.
    """
    # A step is too short for NumPy: an operation there costs what a hundred rows do here.
    given: Sequence[Any] = prompt_lens, num_computed, spans, offsets
    columns = prompt, computed, span, offset = [
        column.tolist() if hasattr(column, "tolist") else list(column) for column in given
    ]
    ends = list(map(add, offset, span))
    if request_ids and (min(map(min, columns)) < 0 or max(ends) > buffer_rows):
        for name, values in zip(("a prompt length", "a progress", "a span", "an offset"), columns, strict=True):
            _refuse(request_ids, f"{name} of at least 0", values, 0)
        _refuse(request_ids, f"a span that ends within {buffer_rows} rows", ends, 0, buffer_rows)
    if not all(map(le, ends, offset[1:])):
        _refuse_overlap(request_ids, offset, ends)
    prefill = list(map(lt, computed, prompt))
    eligible = [length == 1 and not first for length, first in zip(span, prefill, strict=True)]
    return StepPlan(request_ids, prompt, computed, span, offset, prefill, eligible)


def _refuse(request_ids: Sequence[str], expected: str, values: list[int], least: int, most: float = inf) -> None:
    for row, value in enumerate(values):
        if not least <= value <= most:
            raise ContractError("E4", requests=[request_ids[row]], rows=[row], expected=expected, actual=str(value))


def _refuse_overlap(request_ids: Sequence[str], starts: list[int], ends: list[int]) -> None:
    rows = sorted((row for row in range(len(starts)) if starts[row] < ends[row]), key=starts.__getitem__)
    for pair in pairwise(rows):
        before, behind = pair
        if starts[behind] < ends[before]:
            expected = f"a span from row {ends[before]} of the buffer on for the second"
            requests = [request_ids[row] for row in pair]
            raise ContractError("E4", requests=requests, rows=pair, expected=expected, actual=str(starts[behind]))
