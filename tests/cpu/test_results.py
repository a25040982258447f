# SPDX-License-Identifier: Apache-2.0
"""What hooks may return, case by case: accepted, tolerated, or an error that says what was expected."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from omni_npu_phase.contract import MTP_INPUTS, ContractError
from omni_npu_phase.step import results
from omni_npu_phase.step.results import Call, Deviations

WIDTH = 4
IDS = torch.tensor([7])


def _call(rows: int = 1, mode: results.Mode = "on") -> Call:
    index = {f"r{row}": row for row in range(rows)}
    return Call("hook", list(index), index, torch.zeros(8, WIDTH), object(), Deviations(mode))


def _scalar(raw: Any, *, span: int = 1, mtp_width: int | None = WIDTH, mode: results.Mode = "on") -> Any:
    return results.scalar_result(_call(mode=mode), raw, span=span, given_ids=IDS, mtp_width=mtp_width)


ROWS, ID_PART, EMBEDS, UPDATES, INPUTS = range(5)
"""Where the parts of what ``scalar_result`` gives are."""


def _pair(*shape: int) -> dict[str, Any]:
    return {MTP_INPUTS: (torch.zeros(shape), torch.ones(shape))}


def test_mtp_inputs_without_their_batch_dimension(caplog: pytest.LogCaptureFixture) -> None:
    """As the released runner broadcasts them."""
    raw = (IDS, torch.zeros(1, WIDTH), _pair(WIDTH))
    assert [tuple(part.shape) for part in _scalar(raw)[INPUTS]] == [(1, WIDTH)] * 2
    assert len(caplog.records) == 2
    with pytest.raises(ContractError, match=r"hidden states of shape \(1, 4\) .* got \(4,\)"):
        _scalar(raw, mode="strict")


@pytest.mark.parametrize(
    "updates", [{MTP_INPUTS: torch.zeros(2, WIDTH)}, {MTP_INPUTS: [torch.zeros(WIDTH)] * 2}, UserDict(_pair(WIDTH))]
)
def test_mtp_inputs_in_any_form_that_unpacks(updates: Any) -> None:
    result = _scalar((IDS, torch.zeros(1, WIDTH), updates))
    assert [tuple(part.shape) for part in result[INPUTS]] == [(1, WIDTH)] * 2


def test_mtp_inputs_of_a_row_that_is_not_eligible() -> None:
    assert _scalar((IDS, torch.zeros(1, WIDTH), _pair(WIDTH)), mtp_width=None)[INPUTS] is None


def test_mtp_inputs_that_are_none_are_missing() -> None:
    assert _scalar((IDS, torch.zeros(1, WIDTH), {MTP_INPUTS: None}))[INPUTS] is None
    with pytest.raises(ContractError, match="E7"):
        _scalar((IDS, torch.zeros(1, WIDTH), {MTP_INPUTS: None}), mode="strict")


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ({MTP_INPUTS: torch.zeros(3, WIDTH)}, r"expected 2 values \(hidden states, text step\), got 3 values"),
        ({MTP_INPUTS: torch.tensor(0.0)}, "expected 2 values"),
        ({MTP_INPUTS: (torch.zeros(WIDTH),)}, "got 1 values"),
        ({MTP_INPUTS: (torch.zeros(WIDTH), None)}, r"text step of shape \(1, 4\) .* got NoneType"),
        (_pair(WIDTH, 1), r"hidden states of shape \(1, 4\) .* got \(4, 1\)"),
        (_pair(1, 1, WIDTH), r"hidden states of shape \(1, 4\) .* got \(1, 1, 4\)"),
        (_pair(WIDTH + 1), r"hidden states of shape \(1, 4\) .* got \(5,\)"),
        ({MTP_INPUTS: (torch.empty(WIDTH, device="meta"), torch.zeros(WIDTH))}, "hidden states .* on meta"),
    ],
)
def test_mtp_inputs_that_cannot_be_written(updates: dict[str, Any], expected: str) -> None:
    with pytest.raises(ContractError, match=expected):
        _scalar((IDS, torch.zeros(1, WIDTH), updates))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, "got NoneType"),
        ("ab", "got 2 values"),
        ((IDS, None, {}), "inputs_embeds as a tensor with a row for each token, got NoneType"),
        ((IDS, torch.zeros(WIDTH + 1), _pair(WIDTH)), r"inputs_embeds of shape \(1, 4\)"),
        ((IDS, torch.empty(1, WIDTH, device="meta"), {}), "on meta"),
        (
            (torch.empty(1, dtype=torch.int64, device="meta"), torch.zeros(1, WIDTH), _pair(WIDTH)),
            "input_ids .* on meta",
        ),
        ((IDS, torch.zeros(0, WIDTH), _pair(WIDTH)), "an embedding row for MTP, got none"),
    ],
)
def test_scalar_results_that_cannot_be_written(raw: Any, expected: str) -> None:
    with pytest.raises(ContractError, match=expected) as caught:
        _scalar(raw)
    assert (caught.value.clause, caught.value.requests, caught.value.hook) == ("E5", ("r0",), "hook")


@pytest.mark.parametrize("ids", [None, [7], torch.tensor([7, 8])])
def test_ids_that_are_ignored(ids: Any) -> None:
    assert _scalar((ids, torch.zeros(1, WIDTH), _pair(1, WIDTH)))[ID_PART] is None
    with pytest.raises(ContractError, match="expected 1 token ids"):
        _scalar((ids, torch.zeros(1, WIDTH), _pair(1, WIDTH)), mode="strict")


def test_ids_are_counted_against_the_rows_written() -> None:
    """As released: with one row too few, as many ids as rows are still written."""
    result = _scalar((torch.tensor([[1, 2]]), torch.zeros(2, WIDTH), {}), span=3, mtp_width=None)
    assert result[ROWS] == 2
    assert result[ID_PART].tolist() == [1, 2]
    assert result[EMBEDS].shape == (2, WIDTH)


def _batch(**changes: Any) -> tuple[Any, ...]:
    values = {
        "ids": torch.tensor([1, 2]),
        "embeds": torch.zeros(2, WIDTH),
        "hidden": torch.zeros(2, WIDTH),
        "text_step": torch.zeros(2, WIDTH),
        "updates": [{}, {}],
        **changes,
    }
    return tuple(values.values())


def test_good_batches() -> None:
    given = torch.tensor([1, 2])
    same, *_ = results.batch_result(_call(2), _batch(ids=given), given_ids=given, mtp_width=WIDTH)
    assert same is None
    other, *_ = results.batch_result(_call(2), _batch(ids=torch.tensor([[3], [4]])), given_ids=given, mtp_width=WIDTH)
    assert other.tolist() == [3, 4]
    _, _, hidden, text_step, _ = results.batch_result(
        _call(2), (given, torch.zeros(2, WIDTH), ({}, {})), given_ids=given, mtp_width=None
    )
    assert hidden is text_step is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ids": None}, "2 token ids, got NoneType"),
        ({"hidden": None}, r"hidden_states of shape \(2, 4\) .*got NoneType"),
        ({"text_step": torch.zeros(3, WIDTH)}, r"text_step of shape \(2, 4\)"),
        ({"embeds": torch.zeros(1, WIDTH)}, r"inputs_embeds of shape \(2, 4\) .* got \(1, 4\)"),
        ({"embeds": torch.zeros(2, WIDTH, dtype=torch.int64)}, "a floating dtype on cpu, got .*int64"),
        ({"updates": None}, "a sequence of updates, one per request, got NoneType"),
        ({"updates": iter([{}, {}, {}])}, "2 updates, got 3"),
    ],
)
def test_bad_batches(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ContractError, match=expected) as caught:
        results.batch_result(_call(2), _batch(**changes), given_ids=IDS, mtp_width=WIDTH)
    assert isinstance(caught.value, ValueError), "as released runners raise it"
    assert (caught.value.clause, caught.value.requests, caught.value.hook) == ("E5b", ("r0", "r1"), "hook")


@pytest.mark.parametrize("updates", [{"r0": {"x": 0}, "r1": {"x": 1}}.values(), iter([{"x": 0}, {"x": 1}])])
def test_updates_in_any_form_that_iterates(updates: Any) -> None:
    result = results.batch_result(_call(2), _batch(updates=updates), given_ids=IDS, mtp_width=WIDTH)
    assert result[-1] == [{"x": 0}, {"x": 1}]


@pytest.mark.parametrize("odd", [torch.ones(2), np.ones(2), None, "text", UserDict(x=1)])
def test_an_update_that_is_no_dictionary_is_ignored(odd: Any) -> None:
    """As released, which never asks whether it is true: tensors and arrays would not say."""
    result = results.batch_result(_call(2), _batch(updates=[odd, {"x": 1}]), given_ids=IDS, mtp_width=WIDTH)
    assert result[-1] == [{}, {"x": 1}]


@pytest.mark.parametrize("codes", [[[1], [2], [3]], ((1,), (2,)), np.array([[1], [2]])])
def test_codes_that_are_no_tensor(codes: Any) -> None:
    raw = torch.zeros(2, WIDTH), codes
    assert list(results.mtp_result(_call(2), raw)[1]) == list(codes[:2])
    with pytest.raises(ContractError, match="expected codes as a tensor"):
        results.mtp_result(_call(2, "strict"), raw)


@pytest.mark.parametrize("codes", [5, torch.tensor(5), np.array(5), {0: 1, 1: 2}, {1, 2}])
def test_codes_without_rows(codes: Any) -> None:
    with pytest.raises(ContractError, match="codes with a row per request, or None"):
        results.mtp_result(_call(2), (torch.zeros(2, WIDTH), codes))


def test_an_error_names_rows_of_the_input_batch() -> None:
    """They are not the plan's where rows were filled before, or get no hook."""
    call = Call("hook", ["a", "b"], {"a": 4, "filled": 5, "b": 7}, torch.zeros(8, WIDTH), object(), Deviations("on"))
    assert call.error("E5", "x", "y").rows == (4, 7)


def test_deviations_are_said_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    call = _call()
    for kind in ("rows", "rows", "ids"):
        call.deviation("E5", kind, "x", "y")
    assert len(caplog.records) == 2
