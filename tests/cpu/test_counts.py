# SPDX-License-Identifier: Apache-2.0
"""What a step costs, counted: operations that do not grow with rows, with every check of results in place."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from omni_npu_phase.bench.counts import count_step
from omni_npu_phase.bench.steps import Case, Steps, engineless
from omni_npu_phase.buffers import gather
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.contract import ContractError
from omni_npu_phase.step import live as state
from omni_npu_phase.step import v1 as mixin

# Thousands of steps: what runs in them is counted in other tests, and tracing would take minutes.
pytestmark = pytest.mark.no_cover

ROWS = (1, 8, 64, 256)
HIDDEN = 16

hooks = pytest.mark.parametrize("hook", ["batched", "scalar"])
updates_of = pytest.mark.parametrize("updates", ["toy", "talker"])


def _case(rows: int, hook: Any, updates: Any = "toy", **more: Any) -> Case:
    return Case(rows, HIDDEN, hook, updates=updates, **more)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "host"])
@pytest.mark.parametrize("rows", ROWS)
@updates_of
@hooks
def test_work_does_not_grow_with_decode_rows(mixed: type, hook: Any, updates: Any, rows: int, resident: bool) -> None:
    operations = count_step(mixed, _case(rows, hook, updates, resident=resident))
    assert operations.work.total() <= 9, operations.work
    # Slices in bulk: of the step's buffers for scalar hooks, of the MTP buffers, of what is stored.
    assert operations.views.total() <= 24, operations.views


@pytest.mark.parametrize("rows", ROWS)
@updates_of
@hooks
def test_nothing_is_allocated_but_the_codes(mixed: type, hook: Any, updates: Any, rows: int) -> None:
    """They are MTP's own memory, and stored as an owned block. What hooks hand over and do not keep is no copy."""
    assert count_step(mixed, _case(rows, hook, updates)).allocated == 1


@pytest.mark.parametrize("rows", [2, 3, 8, 64, 256])
@updates_of
@hooks
def test_scattered_rows_cost_the_same_whatever_their_number(mixed: type, hook: Any, updates: Any, rows: int) -> None:
    operations = count_step(mixed, _case(rows, hook, updates, mix="mixed", chunk=16))
    assert operations.work.total() <= 12, operations.work
    assert operations.views.total() <= 32, operations.views


@hooks
def test_the_released_runner_grows(released: type, hook: Any) -> None:
    few, many = (count_step(released, _case(rows, hook)) for rows in (8, 64))
    assert many.work.total() - few.work.total() >= 56
    assert many.allocated > few.allocated + 50


# A step of per-row operations is noticed.


def _row_by_row(helper: Any, rows: Any, out: torch.Tensor) -> None:
    for index, row in enumerate(rows):
        out[index : index + 1].copy_(row)


def _one_by_one(helper: Any, tensors: Any) -> torch.Tensor:
    return torch.stack([tensor.clone() for tensor in tensors])


def _row_copies(helper: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    for index in range(source.shape[0]):
        dest[index].copy_(source[index])


def _always(tensors: Any, held: int) -> list[int]:
    return list(range(len(tensors)))


@pytest.mark.parametrize(
    ("hook", "changes"),
    [
        ("scalar", [(BufferHelper, "gather", _row_by_row)]),
        ("scalar", [(state, "reachable", _always)]),
        ("batched", [(state, "reachable", _always), (BufferHelper, "join", _one_by_one)]),
        ("batched", [(BufferHelper, "copy", _row_copies)]),
        ("scalar", [(gather, "reachable", _always)]),
    ],
    ids=["rows-copied", "rows-stored", "updates-stored", "parts-copied", "rows-owned-at-once"],
)
def test_per_row_operations_are_caught(mixed: type, hook: Any, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, instead in changes:
        monkeypatch.setattr(owner, name, instead)
    assert count_step(mixed, _case(64, hook, "talker")).work.total() > 9 + 60


@pytest.mark.parametrize(("hook", "clause"), [("scalar", "E5"), ("batched", "E5b")])
def test_results_are_checked_in_what_is_counted(mixed: type, hook: Any, clause: str) -> None:
    """The limits hold with every check in place: the same step refuses the last of 64 rows."""
    with engineless():
        steps = Steps(mixed, _case(64, hook), torch.device("cpu"))
        if hook == "scalar":
            embeds, _ = steps.model._of_rows[0]
            steps.model._of_rows[0] = embeds, {"mtp_inputs": (embeds, embeds[:, :-1])}
        else:
            steps.model.hidden = steps.model.hidden[:, :-1]
        with pytest.raises(ContractError) as caught:
            steps.take()
    assert caught.value.clause == clause


def _rows_of_one_tensor(cls: type) -> tuple[list[list[float]], list[float]]:
    """What MTP gets, and what is stored, of four rows whose hook fills one and the same tensor anew."""
    with engineless():
        steps = Steps(cls, _case(4, "scalar"), torch.device("cpu"))
        model, reused = steps.model, torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        given = iter(range(1, 5))
        in_mtp: list[list[float]] = []

        def preprocess(input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> Any:
            reused.fill_(next(given))
            return input_ids, reused, {"mtp_inputs": (reused, reused.view(-1)), "mark": reused, "marks": [reused]}

        def talker_mtp(ids: Any, *parts: torch.Tensor, **_: Any) -> Any:
            in_mtp.extend(part[:, 0].tolist() for part in parts)
            return parts[0], model.codes

        model.preprocess, steps.runner.talker_mtp = preprocess, talker_mtp
        steps.take()
        live = [steps.runner.model_intermediate_buffer[f"r{row}"] for row in range(4)]
    return in_mtp, [tensor[0, 0].item() for info in live for tensor in (info["mark"], info["marks"][0])]


def test_a_tensor_that_a_hook_fills_again_is_copied_at_once(mixed: type, released: type) -> None:
    """Rows wait to be written together only where nobody else can reach them."""
    in_mtp, stored = _rows_of_one_tensor(mixed)
    assert in_mtp == [[1, 2, 3, 4]] * 3
    assert stored == [1, 1, 2, 2, 3, 3, 4, 4]
    assert _rows_of_one_tensor(released)[0] == in_mtp


@pytest.mark.parametrize("module", [gather, state])
def test_waiting_for_everything_is_caught(mixed: type, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reachable", lambda tensors, held: [])
    in_mtp, stored = _rows_of_one_tensor(mixed)
    assert in_mtp == [[4] * 4] * 3 or stored == [4] * 8


@pytest.mark.parametrize("rows", [3, 5])
def test_a_tensor_that_a_batched_hook_fills_again_is_copied_at_once(mixed: type, rows: int) -> None:
    """Also in a run of one row: the hook of the next run may fill it."""
    with engineless():
        steps = Steps(mixed, _case(rows, "batched", mix="mixed", chunk=4), torch.device("cpu"))
        model, reused = steps.model, torch.zeros(1)
        chunk = model.preprocess

        def preprocess_decode_batch(input_ids: torch.Tensor, req_infos: list[dict[str, Any]]) -> Any:
            reused.add_(1)
            parts = [model.hidden[: len(req_infos)]] * 3
            return input_ids, *parts, [{"mark": reused, "marks": [reused]} for _ in req_infos]

        def preprocess(*given: Any, **info: Any) -> Any:
            reused.add_(10)
            return chunk(*given, **info)

        model.preprocess_decode_batch, model.preprocess = preprocess_decode_batch, preprocess
        steps.take()
        live = [steps.runner.model_intermediate_buffer[f"r{row}"] for row in range(rows - 1)]
    half = (rows - 1) // 2
    assert [info["mark"].item() for info in live] == [1] * half + [12] * half
    assert [info["marks"][0].item() for info in live] == [1] * half + [12] * half


# Memory.


def _tensor_bytes() -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    }
    return sum(storages.values())


def test_persistent_buffers_are_an_index_a_row() -> None:
    """The CPU helper keeps one int64 index: 8 bytes a row, at most twice the rows of the largest step."""
    helper = CpuBufferHelper(torch.device("cpu"))
    for rows in (1, 64, 256, 100):
        helper.rows([2 * row for row in range(rows)])
    assert helper.held_bytes <= 16 + 8 * 2 * 256


@pytest.mark.parametrize("hook", ["batched", "scalar"])
def test_nothing_grows_while_requests_come_and_go(mixed: type, hook: Any) -> None:
    """Five thousand steps a hook, in each of which one of four requests is replaced by a new one."""
    with engineless():
        steps = Steps(mixed, _case(4, hook), torch.device("cpu"))
        runner, batch = steps.runner, steps.runner.input_batch
        states = dict(runner.requests)
        held, objects = [], []
        for number in range(5000):
            slot, request = number % 4, f"n{number}"
            gone = batch.req_ids[slot]
            runner.requests[request] = states[f"r{slot}"]
            del runner.requests[gone], runner.model_intermediate_buffer[gone]
            batch.req_ids[slot], batch.req_id_to_index[request] = request, batch.req_id_to_index.pop(gone)
            steps._scheduled.num_scheduled_tokens[request] = steps._scheduled.num_scheduled_tokens.pop(gone)
            steps.prepare()
            steps.take()
            if number in (500, 4999):
                gc.collect()
                phase = mixin._phase_of(runner)
                objects.append(len(gc.get_objects()))
                held.append((_tensor_bytes(), len(runner.model_intermediate_buffer), len(phase.helpers)))
    assert held[0] == held[1]
    # Nothing a step or a request, of which there were thousands.
    assert objects[1] - objects[0] < 1000
