# SPDX-License-Identifier: Apache-2.0
"""What a step costs, counted, on the installed models' own hooks and on a toy's, with every check of results made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_npu_phase.bench import models
from omni_npu_phase.bench.counts import Counts, count_step
from omni_npu_phase.bench.steps import Case, Steps, engineless
from omni_npu_phase.buffers.cpu import CpuBufferHelper
from omni_npu_phase.conformance.scenarios import Step
from omni_npu_phase.contract import MTP_INPUTS, ContractError

# Thousands of steps: what runs in them is counted in other tests, and tracing would take minutes.
pytestmark = pytest.mark.no_cover

ROWS = (1, 2, 64)
HIDDEN = 16
BATCHED, SCALAR = (
    pytest.mark.parametrize("updates", [name for name in models.available() if hook in models.HOOKS[name]])
    for hook in ("batched", "scalar")
)
every_rows = pytest.mark.parametrize("rows", ROWS)


def _case(rows: int, hook: Any, updates: Any = "toy", **more: Any) -> Case:
    return Case(rows, HIDDEN, hook, updates=updates, **more)


def _mixed(rows: int, hook: Any, updates: Any) -> Case:
    """So many decode rows, and a prompt chunk in their middle."""
    return _case(rows, hook, updates, mix="mixed", chunk=16)


def _work(counts: Counts) -> int:
    return counts.operations.work.total()


@every_rows
@BATCHED
def test_a_batched_step_runs_9_operations(mixed: type, updates: Any, rows: int) -> None:
    counts = count_step(mixed, _case(rows, "batched", updates))
    assert _work(counts) <= 9, counts
    # The ids lent to the hook, the codes, and what joins the rows' updates.
    assert counts.operations.allocated <= 2 + bool(counts.updates), counts


@every_rows
@BATCHED
def test_beside_a_chunk_a_batched_step_runs_4_more(mixed: type, updates: Any, rows: int) -> None:
    counts = count_step(mixed, _mixed(rows, "batched", updates))
    assert _work(counts) <= 9 + 4, counts
    assert counts.operations.allocated <= 4 + 2 * bool(counts.updates), counts


@every_rows
@SCALAR
def test_a_scalar_row_costs_one_operation_and_one_for_each_update(mixed: type, updates: Any, rows: int) -> None:
    counts = count_step(mixed, _case(rows, "scalar", updates))
    assert _work(counts) <= rows + counts.updates + 5, counts
    assert counts.operations.allocated <= counts.updates + 1, counts


@every_rows
@SCALAR
def test_beside_a_chunk_a_scalar_step_runs_4_more(mixed: type, updates: Any, rows: int) -> None:
    counts = count_step(mixed, _mixed(rows, "scalar", updates))
    assert _work(counts) <= rows + counts.updates + 5 + 4, counts
    assert counts.operations.allocated <= counts.updates + 3, counts


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("updates", models.available())
def test_the_released_runner_for_comparison(released: type, updates: Any, rows: int) -> None:
    """The figures beside which these limits stand. It reads each row's offset from a tensor, one value at a time."""
    scalar = count_step(released, _case(rows, "scalar", updates))
    assert abs(_work(scalar) - 7 * rows) <= 2, scalar
    if "batched" in models.HOOKS[updates]:
        batched = count_step(released, _case(rows, "batched", updates))
        assert abs(_work(batched) - (10 + rows)) <= 1, batched


@pytest.mark.parametrize("updates", [name for name in models.available() if name != "toy"])
def test_the_hooks_are_in_their_decode_state(mixed: type, updates: Any) -> None:
    """What a model keeps moves on with every step, and every row hands MTP what the forward left."""
    kept = {
        "qwen3-tts": lambda info: info["meta"]["talker_text_offset"],
        "moss-tts": lambda info: info["generated_len"],
        "personaplex": lambda info: info["meta"]["pplex_frame"] - info["meta"]["pplex_prefill_len"],
    }
    with engineless():
        steps = Steps(mixed, _case(3, "scalar", updates), torch.device("cpu"))
        for number in range(1, 4):
            live = [steps.live()[f"r{row}"] for row in range(3)]
            steps.take()
            assert torch.equal(steps.mtp_inputs()[2][:3], torch.stack([info["hidden_states"]["last"] for info in live]))
            steps.finish()
            assert [kept[updates](info) for info in live] == [number] * 3


# A step of more operations is noticed.


def _one_by_one(helper: Any, dests: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for dest, source in zip(dests, sources, strict=True):
        for index in range(source.shape[0]):
            dest[index].copy_(source[index])


def test_row_copies_are_caught(mixed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBufferHelper, "copy_all", _one_by_one)
    for hook in ("batched", "scalar"):
        assert _work(count_step(mixed, _case(64, hook, "qwen3-tts"))) > 64 + 64 + 5


@pytest.mark.parametrize(("hook", "clause"), [("scalar", "E5"), ("batched", "E5b")])
def test_results_are_checked_in_what_is_counted(
    mixed: type, hook: Any, clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits hold with every check in place: the same step refuses one row of 64 that is too short."""
    with engineless():
        steps = Steps(mixed, _case(64, hook), torch.device("cpu"))
        own = steps.model.preprocess if hook == "scalar" else steps.model.preprocess_decode_batch

        def scalar(**given: Any) -> Any:
            ids, embeds, updates = own(**given)
            text_step = embeds[:, :-1] if given["request_id"] == "r63" else embeds
            return ids, embeds, {**updates, MTP_INPUTS: (embeds, text_step)}

        def batched(**given: Any) -> Any:
            ids, embeds, hidden, text_step, updates = own(**given)
            return ids, embeds, hidden, text_step[:, :-1], updates

        steps.model.preprocess, steps.model.preprocess_decode_batch = (
            (scalar, None) if hook == "scalar" else (own, batched)
        )
        with pytest.raises(ContractError) as caught:
            steps.take()
    assert caught.value.clause == clause


# Memory.


def _tensor_bytes() -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    }
    return sum(storages.values())


def test_persistent_buffers_are_an_index_a_row() -> None:
    """The CPU helper keeps one int64 index: 8 bytes for each row that was located last."""
    helper = CpuBufferHelper(torch.device("cpu"))
    for rows in (1, 64, 256, 100):
        helper.rows([2 * row for row in range(rows)])
    assert sum(held.nbytes for held in vars(helper).values() if isinstance(held, torch.Tensor)) == 16 + 8 * 100


class _Coming(Steps):
    """Requests of which the oldest goes and a new one comes with every step."""

    gone = 0

    def _rows(self, number: int) -> Step:
        return tuple(replace(row, request=f"r{self.gone + index}") for index, row in enumerate(super()._rows(number)))


@pytest.fixture
def alone() -> Iterator[None]:
    """What other tests left, and may still let go of, is not among the objects that the garbage collector knows."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("hook", ["batched", "scalar"])
def test_nothing_grows_while_requests_come_and_go(mixed: type, hook: Any) -> None:
    with engineless():
        steps = _Coming(mixed, _case(4, hook), torch.device("cpu"))
        runner = steps.runner
        objects, held = [], []
        for number in range(2000):
            steps.take()
            steps.gone += 1
            steps.finish()
            # As the runner does where it is told what has ended.
            for ended in runner.requests.keys() - set(runner.input_batch.req_ids):
                del runner.requests[ended]
                runner.model_intermediate_buffer.pop(ended, None)
            if number in (500, 1250, 1999):
                gc.collect()
                objects.append(len(gc.get_objects()))
                held.append((_tensor_bytes(), len(runner.model_intermediate_buffer)))
    assert held[0] == held[1] == held[2]
    # Nothing a step or a request, of which there were 750 each time; what is imported meanwhile comes once.
    assert min(objects[1] - objects[0], objects[2] - objects[1]) < 250
