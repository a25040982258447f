# SPDX-License-Identifier: Apache-2.0
"""Whole steps with the mixin on device tensors: routing, ownership, and what a decode step costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from omni_npu_phase.buffers.cuda import CudaBufferHelper
from omni_npu_phase.contract import IS_PREFILL
from omni_npu_phase.releases import fits
from tests.cuda.device import Device
from tests.cuda.runner import CODES, MTP, PROMPT, RUNTIME, Hook, Row, Runner, Talker
from tests.fake_cuda import Counts

ROWS = (1, 8, 64)
TOKENS = 256
MIXED = (
    Row("chunk", 9, 0, 4),
    Row("one", 5, 5, 1),
    Row("tail", 5, 4, 1),
    Row("two", 3, 7, 1),
    Row("three", 3, 3, 1),
    Row("short", 1, 0, 1),
    Row("four", 2, 2, 1),
)
every_hook = pytest.mark.parametrize("hook", ["batched", "scalar"])


@pytest.fixture(autouse=True)
def _known_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "RUNTIMES", (RUNTIME,))
    monkeypatch.setattr(fits, "mismatches", lambda *_: [])


def _runner(hook: Hook, rows: int, device: Device) -> Runner:
    runner = Runner(Talker(hook, rows, device.torch), rows, TOKENS, device.torch)
    runner.input_ids.copy_(torch.arange(1, TOKENS + 1, dtype=torch.int32))
    return runner


def _decodes(rows: int, step: int, *, scattered: bool) -> list[Row]:
    decodes = [Row(f"r{number}", 3, 3 + step, 1) for number in range(rows)]
    # The chunk grows from step to step, so that every step has offsets of its own.
    return [*decodes[:1], Row("chunk", 50, 8 * step, 4 + step), *decodes[1:]] if scattered else decodes


def _step(runner: Runner, rows: Sequence[Row]) -> Any:
    scheduled, tokens = runner.place(rows)
    with torch.inference_mode():
        return runner._preprocess(scheduled, tokens)


def check_mixed_step(hook: Hook, device: Device) -> None:
    """Every row gets its own embedding and MTP those of decode rows only, whose codes stay theirs (T1 to T5, T9)."""
    runner = _runner(hook, len(MIXED), device)
    device.occupy()
    _, embeds, *_ = _step(runner, MIXED)
    infos = {row.request: runner.model_intermediate_buffer[row.request] for row in MIXED}
    stored = {request: info["codes"]["audio"] for request, info in infos.items() if "codes" in info}
    # Now, before anything waits for the device.
    at_once = {request: codes.clone() for request, codes in stored.items()}
    assert {codes.device.type for codes in stored.values()} == {"cpu"}
    assert runner.model.calls == 1
    told = [(kind, info[IS_PREFILL]) for kind, info in runner.model.told]
    assert len(told) == len(MIXED)
    assert [prefill for kind, prefill in told if kind == "batched"] == [False] * (4 if hook == "batched" else 0)
    assert embeds.data_ptr() == runner.inputs_embeds.data_ptr()
    start = 0
    for row in MIXED:
        ids = torch.arange(start + 1, start + row.span + 1)
        added = PROMPT + MTP * row.decodes
        assert embeds[start : start + row.span, 0].tolist() == (ids + added).tolist()
        assert infos[row.request][IS_PREFILL] is (row.computed < row.prompt)
        start += row.span
    # The next call of MTP writes over the memory that these came from.
    _step(runner, [Row("one", 5, 6, 1), Row("later", 2, 2, 1), Row("last", 2, 2, 1), Row("end", 2, 2, 1)])
    expected = {"one": [[5] * CODES], "two": [[7] * CODES], "three": [[8] * CODES], "four": [[10] * CODES]}
    for codes in (at_once, stored):
        assert {request: value.tolist() for request, value in codes.items()} == expected


@every_hook
def test_a_mixed_step(hook: Hook, device: Device) -> None:
    check_mixed_step(hook, device)


def cost(hook: Hook, rows: int, scattered: bool, device: Device) -> Counts:
    """Counts of the third of three steps."""
    runner = _runner(hook, rows + 1, device)
    for step in range(2):
        _step(runner, _decodes(rows, step, scattered=scattered))
    with device.counting() as counts:
        device.occupy()
        _step(runner, _decodes(rows, 2, scattered=scattered))
    assert runner.model.calls == 3
    for number in (0, rows - 1):
        codes = runner.model_intermediate_buffer[f"r{number}"]["codes"]["audio"]
        offset = number + (6 if scattered and number else 0)
        assert codes.tolist() == [[offset + 1] * CODES]
    return counts


@every_hook
@pytest.mark.parametrize("scattered", [False, True], ids=["sequence", "scattered"])
@pytest.mark.parametrize("rows", ROWS)
def test_one_transfer_and_one_wait(rows: int, scattered: bool, hook: Hook, device: Device) -> None:
    """Results come back together; rows in sequence need no index, others one."""
    counts = cost(hook, rows, scattered, device)
    assert (counts.to_host, counts.waits) == (1, 1)
    assert counts.to_device == int(scattered and rows > 1)


@pytest.mark.parametrize("scattered", [False, True], ids=["sequence", "scattered"])
def test_kernels_do_not_grow_with_rows(scattered: bool, device: Device) -> None:
    """Those of the batched hook and of MTP included, which are as many for any number of rows."""
    few, many = (cost("batched", rows, scattered, device).kernels for rows in (8, 64))
    assert few == many


def _read_too_early(helper: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@pytest.mark.standin
@every_hook
def test_results_read_too_early_are_caught(hook: Hook, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBufferHelper, "_to_host", _read_too_early)
    with pytest.raises(AssertionError):
        check_mixed_step(hook, device)
