# SPDX-License-Identifier: Apache-2.0
"""Plans: every row once, runs as the contract groups them, and bad lengths refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_npu_phase import contract
from omni_npu_phase.contract import ContractError
from omni_npu_phase.plan import StepPlan, plan_step

row_lengths = st.tuples(st.integers(0, 6), st.integers(0, 8), st.integers(0, 3), st.integers(0, 1))


def _plan(rows: list[tuple[int, int, int, int]]) -> StepPlan:
    """Rows as (P, C, S, gap before the row)."""
    offsets, at = [], 0
    for _, _, span, gap in rows:
        at += gap
        offsets.append(at)
        at += span
    names = [f"r{row}" for row in range(len(rows))]
    columns = [[row[index] for row in rows] for index in range(3)]
    return plan_step(names, *columns, offsets, buffer_rows=at)


@given(st.lists(row_lengths, max_size=10), st.booleans())
def test_runs(rows: list[tuple[int, int, int, int]], batched: bool) -> None:
    step = _plan(rows)
    runs = list(step.runs(batched=batched))
    assert [row for run in runs for row in run.rows] == list(range(len(rows)))
    for run in runs:
        if run.batched:
            assert batched
            assert all(step.eligible[row] for row in run.rows)
            assert [step.offsets[row] - step.offsets[run.start] for row in run.rows] == list(range(len(run.rows)))
        else:
            assert len(run.rows) == 1
            assert not (batched and step.eligible[run.start])
    for one, other in itertools.pairwise(runs):
        touching = step.offsets[other.start] == step.offsets[one.stop - 1] + 1
        assert not (one.batched and other.batched and touching), "a run was cut in two"


@given(st.lists(row_lengths, min_size=1, max_size=10))
def test_fields(rows: list[tuple[int, int, int, int]]) -> None:
    step = _plan(rows)
    assert len(step) == len(rows)
    for row, (prompt, computed, _, _) in enumerate(rows):
        fields = step.fields(row)
        assert fields == dict(zip(contract.FIELDS, (prompt, computed, computed < prompt), strict=True))
        assert {name: type(value) for name, value in fields.items()} == contract.FIELD_TYPES


def test_numpy_and_tensor_lengths() -> None:
    import torch

    step = plan_step(["a"], np.array([3], dtype=np.int32), torch.tensor([1]), [2], torch.tensor([0]), buffer_rows=2)
    assert step.fields(0) == {contract.PROMPT_LEN: 3, contract.NUM_COMPUTED: 1, contract.IS_PREFILL: True}


def test_empty_step() -> None:
    step = plan_step([], [], [], [], [], buffer_rows=0)
    assert len(step) == 0
    assert list(step.runs(batched=True)) == []


@pytest.mark.parametrize(
    ("prompt", "computed", "span", "offset", "named"),
    [
        (-1, 0, 1, 1, "prompt length"),
        (3, -2, 1, 1, "progress"),
        (3, 0, -1, 1, "span"),
        (3, 0, 1, -1, "offset"),
        (3, 0, 4, 1, "within 4 rows"),
    ],
)
def test_refused(prompt: int, computed: int, span: int, offset: int, named: str) -> None:
    with pytest.raises(ContractError, match=named) as caught:
        plan_step(["fine", "bad"], [2, prompt], [2, computed], [1, span], [0, offset], buffer_rows=4)
    assert (caught.value.clause, caught.value.requests, caught.value.rows) == ("E4", ("bad",), (1,))
