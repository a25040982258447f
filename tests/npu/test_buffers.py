# SPDX-License-Identifier: Apache-2.0
"""The Ascend helper: right results, and what it costs, counted on the emulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_npu_phase import buffers
from omni_npu_phase.buffers.staging import PinnedStaging, StagedBufferHelper

ROWS = (1, 8, 64)


@pytest.fixture
def helper(device: torch.device) -> StagedBufferHelper:
    made = buffers.for_device(device)
    assert isinstance(made, StagedBufferHelper)
    return made


def _scattered(rows: int) -> list[int]:
    return [3 * row + 1 for row in range(rows)][::-1] if rows > 1 else [5]


@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_put(rows: int, helper: StagedBufferHelper, device: torch.device) -> None:
    for offsets in (list(range(2, rows + 2)), _scattered(rows)):
        dest = torch.zeros(200, 4, device=device)
        source = torch.arange(4.0 * rows).reshape(rows, 4).to(device)
        helper.put(dest, helper.rows(offsets), source)
        assert torch.equal(dest.cpu()[offsets], source.cpu())


@pytest.mark.parametrize("rows", ROWS)
def test_an_index_is_one_pinned_upload(rows: int, helper: StagedBufferHelper, emulated: Any) -> None:
    helper.rows(_scattered(64))  # the first index allocates
    with emulated.counting() as counting:
        index = helper.rows([offset + 1 for offset in _scattered(rows)])
        again = helper.rows([offset + 1 for offset in _scattered(rows)])
    assert again is index if rows > 1 else index == slice(6, 7)
    counts = counting.counts
    assert (counts.h2d_async, counts.h2d_sync, counts.host_syncs) == ((1, 0, 0) if rows > 1 else (0, 0, 0))
    assert counts.device_allocs == 0
    counting.assert_no_hazards()
    torch.npu.synchronize()
    if rows > 1:
        assert isinstance(index, torch.Tensor)
        assert (index.dtype, index.device.type) == (torch.int64, "npu")
        assert index.tolist() == [offset + 1 for offset in _scattered(rows)]


@pytest.mark.parametrize("rows", ROWS)
def test_writes_never_synchronise(rows: int, helper: StagedBufferHelper, device: torch.device, emulated: Any) -> None:
    dest = torch.zeros(200, 4, device=device, dtype=torch.bfloat16)
    source = torch.ones(rows, 4, device=device)
    located = helper.rows(_scattered(rows))
    out = torch.zeros(rows, 4, device=device, dtype=torch.bfloat16)
    host = torch.ones(rows, 4)
    torch.npu.synchronize()
    with emulated.counting() as counting:
        helper.put(dest, located, source)
        helper.put(dest, slice(1, rows + 1), source)
        helper.copy(out, host)
        host.zero_()
    assert counting.counts.host_syncs == 0
    assert counting.counts.h2d_sync == 0
    counting.assert_no_hazards()
    torch.npu.synchronize()
    assert out.float().cpu().eq(1).all()


@pytest.mark.parametrize("rows", ROWS)
def test_results_come_back_in_one_transfer(
    rows: int, helper: StagedBufferHelper, device: torch.device, emulated: Any
) -> None:
    """Whatever their number and kind: a talker returns a device scalar beside its codes for every row."""
    tensors = [torch.full((1, 16), row, device=device, dtype=torch.int64) for row in range(rows)]
    tensors += [torch.tensor(row % 2 == 0).to(device) for row in range(rows)]
    torch.npu.synchronize()
    with emulated.counting() as counting:
        copies = helper.fetch(tensors)
    assert counting.counts.d2h == 1
    assert counting.counts.host_syncs == 1
    for tensor in tensors:
        tensor.zero_()
    for row in range(rows):
        assert copies[row].tolist() == [[row] * 16]
        assert copies[rows + row].item() is (row % 2 == 0)
    assert {copy.device.type for copy in copies} == {"cpu"}


def test_resident_copies_are_one_owned_batch(helper: StagedBufferHelper, device: torch.device, emulated: Any) -> None:
    tensors = [torch.full((1, 4), row, device=device) for row in range(64)]
    torch.npu.synchronize()
    with emulated.counting() as counting:
        copies = helper.stack(tensors)
    assert (counting.counts.d2h, counting.counts.h2d, counting.counts.host_syncs) == (0, 0, 0)
    tensors[5].zero_()
    assert copies[5].tolist() == [[5] * 4]


def test_what_is_kept_from_step_to_step(helper: StagedBufferHelper) -> None:
    """An index of the last scattered rows, and four pinned slots of at most twice the largest upload."""
    for _ in range(3):
        for rows in (8, 256, 100):
            helper.rows(_scattered(rows))
    held = [kept for kept in vars(helper).values() if isinstance(kept, torch.Tensor)]
    assert sum(kept.nbytes for kept in held) == 16 + 8 * 100
    slots = helper._staging._slots
    assert len(slots) == 4
    assert sum(slot.memory.nbytes for slot in slots) <= 4 * 2 * 8 * 256
    torch.npu.synchronize()


def test_slots_rotate_and_wait_for_their_upload(device: torch.device, emulated: Any) -> None:
    """A slot is used again only behind its event, and that wait is the only one."""
    staging = PinnedStaging(device, slots=2)
    dest = [torch.zeros(8, device=device) for _ in range(4)]
    sources = [torch.full((8,), float(number)) for number in range(4)]
    torch.npu.synchronize()
    waits = []
    for target, source in zip(dest, sources, strict=True):
        with emulated.counting() as counting:
            staging.upload(target, source)
        counting.assert_no_hazards()
        assert (counting.counts.stream_syncs, counting.counts.device_syncs) == (0, 0)
        waits.append(counting.counts.event_syncs)
    assert waits == [0, 0, 1, 1]
    torch.npu.synchronize()
    assert [target.tolist() for target in dest] == [source.tolist() for source in sources]


def test_nothing_to_upload(device: torch.device, emulated: Any) -> None:
    with emulated.counting() as counting:
        PinnedStaging(device).upload(torch.zeros(0, device=device), torch.zeros(0))
    assert counting.counts.h2d == 0


# The faults that the helper avoids, each as torch_npu shows it; tests of whole steps catch them as mutants.


def test_early_reuse_is_a_hazard(device: torch.device, emulated: Any) -> None:
    staging = PinnedStaging(device, slots=1)
    dest = torch.zeros(8, device=device)
    staging.upload(dest, torch.ones(8))
    with emulated.counting() as counting:
        staging._slots[0].event = None
        staging.upload(dest, torch.full((8,), 2.0))
    assert len(counting.hazards) == 1
    assert "source" in counting.hazards[0]
    torch.npu.synchronize()


def test_a_pageable_upload_synchronises(device: torch.device, emulated: Any) -> None:
    dest = torch.zeros(8, device=device)
    torch.npu.synchronize()
    with emulated.counting() as counting:
        dest.copy_(torch.ones(8), non_blocking=True)
    assert counting.counts.host_syncs == 1


def test_a_narrow_index_is_refused(device: torch.device) -> None:
    dest, source = torch.zeros(8, 2, device=device), torch.ones(2, 2, device=device)
    with pytest.raises((RuntimeError, IndexError)):
        dest.index_copy_(0, torch.tensor([1, 3], dtype=torch.int32).to(device), source)


def test_a_copy_per_tensor_is_a_wait_per_tensor(device: torch.device, emulated: Any) -> None:
    tensors = [torch.tensor(True).to(device) for _ in range(8)]
    torch.npu.synchronize()
    with emulated.counting() as counting:
        for tensor in tensors:
            tensor.to("cpu")
    assert counting.counts.host_syncs == counting.counts.d2h == 8


def test_a_result_that_is_not_copied_changes(helper: StagedBufferHelper, device: torch.device) -> None:
    source = torch.ones(4, device=device)
    kept, aliased = helper.snapshot(source), source.detach()
    source.fill_(9)
    assert kept.tolist() == [1] * 4
    assert aliased.tolist() == [9] * 4
