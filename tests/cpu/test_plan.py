# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: what every row is, and which rows one hook call takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase import contract
from omni_npu_phase.contract import ContractError
from omni_npu_phase.step.plan import Run, StepPlan, plan_step

# P, C, S and the free buffer rows before the row's own.
rows_of_a_step = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.sampled_from([0, 0, 0, 1])), max_size=12
)


def _plan(rows: list[tuple[int, int, int, int]]) -> StepPlan:
    offsets, end = [], 0
    for _, _, span, gap in rows:
        offsets.append(end + gap)
        end += gap + span
    columns = [[row[column] for row in rows] for column in range(3)]
    return plan_step([f"r{index}" for index in range(len(rows))], *columns, offsets, buffer_rows=end)


@given(rows_of_a_step)
def test_rows_are_what_the_contract_says(rows: list[tuple[int, int, int, int]]) -> None:
    plan = _plan(rows)
    assert len(plan) == len(rows)
    for index, (prompt, computed, span, _) in enumerate(rows):
        assert plan.prefill[index] == contract.Row(prompt, computed, span).prefill
        assert plan.eligible[index] == contract.Row(prompt, computed, span).eligible
        fields: dict[str, Any] = {}
        plan.write_fields([index], [fields])
        assert list(fields.values()) == [prompt, computed, computed < prompt]
        # Hooks are handed these as they are.
        assert {name: type(value) for name, value in fields.items()} == dict(contract.FIELD_TYPES)


@given(rows_of_a_step, st.booleans())
def test_runs_partition_the_rows_in_order(rows: list[tuple[int, int, int, int]], batched: bool) -> None:
    runs = list(_plan(rows).runs(batched=batched))
    assert [row for run in runs for row in run.rows] == list(range(len(rows)))


@given(rows_of_a_step)
def test_without_a_batched_hook_no_run_is_batched(rows: list[tuple[int, int, int, int]]) -> None:
    assert list(_plan(rows).runs(batched=False)) == ([Run(range(len(rows)), False)] if rows else [])


@given(rows_of_a_step)
def test_batched_runs_are_eligible_contiguous_and_maximal(rows: list[tuple[int, int, int, int]]) -> None:
    plan = _plan(rows)
    runs = list(plan.runs(batched=True))
    for run in runs:
        assert {plan.eligible[row] for row in run.rows} == {run.batched}
        offsets = [plan.offsets[row] for row in run.rows]
        assert not run.batched or offsets == list(range(offsets[0], offsets[0] + len(offsets)))
    for before, after in pairwise(runs):
        adjacent = plan.offsets[after.rows[0]] == plan.offsets[after.rows[0] - 1] + 1
        assert before.batched != after.batched or (before.batched and not adjacent)


def test_gap_between_offsets_splits_a_run() -> None:
    decodes = [(1, 2, 1, gap) for gap in (0, 0, 1, 0)]
    assert list(_plan(decodes).runs(batched=True)) == [Run(range(2), True), Run(range(2, 4), True)]


@given(rows_of_a_step)
def test_gathered_rows_come_first_and_all_at_once(rows: list[tuple[int, int, int, int]]) -> None:
    plan = _plan(rows)
    runs = list(plan.runs(batched=True, gathered=True))
    decodes = [row for row in range(len(plan)) if plan.eligible[row]]
    others = [row for row in range(len(plan)) if not plan.eligible[row]]
    assert [list(run.rows) for run in runs if run.batched] == ([decodes] if decodes else [])
    assert [list(run.rows) for run in runs if not run.batched] == ([others] if others else [])
    assert [run.batched for run in runs] == sorted((run.batched for run in runs), reverse=True)
    assert list(plan.runs(batched=False, gathered=True)) == list(plan.runs(batched=False))


def test_empty_step() -> None:
    plan = plan_step([], [], [], [], [], buffer_rows=0)
    assert len(plan) == 0
    assert list(plan.runs(batched=True)) == list(plan.runs(batched=False)) == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_any_integer_array_gives_python_values(dtype: Any) -> None:
    plan = plan_step(["a"], *(np.array([value], dtype=dtype) for value in (5, 4, 1, 0)), buffer_rows=4)
    for values in (plan.prompt_lens, plan.num_computed, plan.spans, plan.offsets):
        assert type(values[0]) is int
    assert type(plan.prefill[0]) is type(plan.eligible[0]) is bool


@pytest.mark.parametrize(
    ("column", "value", "expected", "actual"),
    [
        (0, -1, "a prompt length of at least 0", "-1"),
        (1, -2, "a progress of at least 0", "-2"),
        (2, -1, "a span of at least 0", "-1"),
        (3, -3, "an offset of at least 0", "-3"),
        (2, 4, "a span that ends within 6 rows", "7"),
        (3, 6, "a span that ends within 6 rows", "7"),
    ],
)
def test_impossible_rows_are_refused_by_name(column: int, value: int, expected: str, actual: str) -> None:
    columns = [[4, 4], [4, 6], [1, 1], [0, 3]]
    assert len(plan_step(["a", "b"], *columns, buffer_rows=6)) == 2
    columns[column][1] = value
    with pytest.raises(ContractError) as caught:
        plan_step(["a", "b"], *columns, buffer_rows=6)
    error = caught.value
    assert (error.clause, error.hook, error.requests, error.rows) == ("E4", None, ("b",), (1,))
    assert (error.expected, error.actual) == (expected, actual)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=5))
def test_overlapping_spans_are_refused_in_any_order(rows: list[tuple[int, int]]) -> None:
    offsets, spans = [start for start, _ in rows], [span for _, span in rows]
    places = [place for start, span in rows for place in range(start, start + span)]
    columns = [5] * len(rows), [7] * len(rows), spans, offsets
    requests = [f"r{index}" for index in range(len(rows))]
    if len(places) == len(set(places)):
        assert len(plan_step(requests, *columns, buffer_rows=12)) == len(rows)
        return
    with pytest.raises(ContractError) as caught:
        plan_step(requests, *columns, buffer_rows=12)
    first, second = (range(offsets[row], offsets[row] + spans[row]) for row in caught.value.rows)
    assert caught.value.clause == "E4"
    assert set(first) & set(second)
