# SPDX-License-Identifier: Apache-2.0
"""The CUDA helper: right results while the device is behind, and what it costs, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_npu_phase import buffers
from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.cuda import CudaBufferHelper
from omni_npu_phase.buffers.staging import PinnedStaging, StagedBufferHelper
from tests.cuda.device import Device

ROWS = (1, 8, 64)
every_number = pytest.mark.parametrize("rows", ROWS)


def _helper(device: Device) -> CudaBufferHelper:
    made = buffers.for_device(device.torch)
    assert isinstance(made, CudaBufferHelper)
    return made


def _warm(helper: CudaBufferHelper) -> CudaBufferHelper:
    """Have pinned memory allocated: that waits for the device, and so would hide what is used too early."""
    memory = torch.zeros(64, 16, device=helper.device, dtype=torch.int64)
    for _ in range(4):
        helper.copy(memory, torch.zeros(64, 16))
    helper.fetch([memory, memory])
    return helper


def _scattered(rows: int) -> list[int]:
    return [3 * row + 1 for row in range(rows)][::-1] if rows > 1 else [5]


def test_what_is_counted_is_seen(device: Device) -> None:
    """One of each, so that a count of none means none."""
    memory = torch.zeros(64, device=device.torch)
    host = torch.ones(64)
    with device.counting() as counts:
        memory.copy_(host)
        memory.add_(1)
        memory.cpu()
    assert (counts.to_device, counts.to_host, counts.kernels) == (1, 1, 1)
    assert counts.waits >= 1


@every_number
def test_rows_are_put(rows: int, device: Device) -> None:
    helper = _helper(device)
    for offsets in (list(range(2, rows + 2)), _scattered(rows)):
        dest = torch.zeros(200, 4, device=device.torch)
        source = torch.arange(4.0 * rows).reshape(rows, 4).to(device.torch)
        helper.put(dest, helper.rows(offsets), source)
        assert torch.equal(dest.cpu()[offsets], source.cpu())
        assert torch.equal(out.cpu(), source.cpu())


@every_number
def test_an_index_is_uploaded_once(rows: int, device: Device) -> None:
    helper = _helper(device)
    helper.rows(_scattered(64))  # The first index allocates.
    wanted = [offset + 1 for offset in _scattered(rows)]
    with device.counting() as counts:
        index = helper.rows(wanted)
        again = helper.rows(wanted)
    assert again is index if rows > 1 else index == slice(6, 7)
    assert (counts.to_device, counts.to_host, counts.waits) == (int(rows > 1), 0, 0)
    if rows > 1:
        assert isinstance(index, torch.Tensor)
        assert (index.dtype, index.device.type) == (torch.int64, "cuda")
        assert index.tolist() == wanted


def check_writes(rows: int, device: Device) -> None:
    """The host writes rows and goes on, and may use its own memory again at once."""
    helper = _warm(_helper(device))
    dest = torch.zeros(200, 4, device=device.torch, dtype=torch.bfloat16)
    source = torch.ones(rows, 4, device=device.torch)
    located = helper.rows(_scattered(rows))
    outs = [torch.zeros(rows, 4, device=device.torch, dtype=torch.bfloat16) for _ in range(2)]
    host = torch.ones(rows, 4)
    with device.counting() as counts:
        device.occupy()
        helper.put(dest, located, source)
        helper.put(dest, slice(1, rows + 1), source)
        for number, out in enumerate(outs, 1):
            helper.copy(out, host.fill_(number))
        host.zero_()
    assert (counts.to_device, counts.to_host, counts.waits) == (2, 0, 0)
    assert [out.float().cpu().unique().tolist() for out in outs] == [[1.0], [2.0]]
    assert dest[slice(1, rows + 1)].float().cpu().eq(1).all()


@every_number
def test_writes_never_wait(rows: int, device: Device) -> None:
    check_writes(rows, device)


def check_results(rows: int, device: Device) -> None:
    """All results come back in one transfer with one wait, and are owned."""
    helper = _warm(_helper(device))
    codes = [torch.full((1, 16), row, device=device.torch, dtype=torch.int64) for row in range(rows)]
    # A talker returns a device scalar beside its codes for every row.
    marks = [torch.tensor(row % 2 == 0).to(device.torch) for row in range(rows)]
    with device.counting() as counts:
        device.occupy()
        host = helper.fetch([*codes, *marks])
        seen = [block.clone() for block in host]
    assert (counts.to_device, counts.to_host, counts.waits) == (0, 1, 1)
    for tensor in (*codes, *marks):
        tensor.zero_()
    for copies in (seen, host):
        assert {copy.device.type for copy in copies} == {"cpu"}
        for row in range(rows):
            assert copies[row].tolist() == [[row] * 16]
            assert copies[rows + row].item() is (row % 2 == 0)


@every_number
def test_results_come_back_in_one_transfer(rows: int, device: Device) -> None:
    check_results(rows, device)


def test_later_results_leave_earlier_ones_alone(device: Device) -> None:
    helper = _helper(device)
    first = helper.fetch([torch.full((64,), 1, dtype=torch.uint8, device=device.torch)])
    helper.fetch([torch.full((64,), 2, dtype=torch.uint8, device=device.torch)])
    assert first[0].unique().tolist() == [1]
    assert helper.fetch([]) == []


def test_resident_copies_are_one_owned_batch(device: Device) -> None:
    helper = _helper(device)
    few, many = ([torch.full((1, 4), row, device=device.torch) for row in range(rows)] for rows in (8, 64))
    with device.counting() as counts:
        helper.stack(few)
    launched = counts.kernels
    with device.counting() as counts:
        copies = helper.stack(many)
    assert (counts.to_device, counts.to_host, counts.waits, counts.kernels) == (0, 0, 0, launched)
    many[5].zero_()
    assert copies[5].tolist() == [[5] * 4]


def check_rotation(device: Device) -> None:
    """A slot is used again only behind its event, and that wait is the only one."""
    staging = PinnedStaging(device.torch, slots=2)
    dests = [torch.zeros(8, device=device.torch) for _ in range(4)]
    for dest in dests[:2]:
        staging.upload(dest, torch.zeros(8))  # The first uploads allocate.
    with device.counting() as counts:
        for number, dest in enumerate(dests):
            device.occupy()
            staging.upload(dest, torch.full((8,), float(number)))
    assert counts.waits == 2
    assert [dest.unique().tolist() for dest in dests] == [[0.0], [1.0], [2.0], [3.0]]


def test_slots_rotate_and_wait_for_their_upload(device: Device) -> None:
    check_rotation(device)


def test_capture(device: Device) -> None:
    """Rows written within the device are captured, and replayed at the same addresses."""
    helper = _helper(device)
    memory = torch.zeros(8, 4, device=device.torch)
    source = torch.ones(3, 4, device=device.torch)
    out = torch.zeros(3, 4, device=device.torch)

    def work() -> None:
        helper.put(memory, slice(2, 5), source)
        helper.copy(memory[:1], source[:1])
        helper.put(memory, slice(5, 7), helper.snapshot(source[:2]))

    replay = device.captured(work)
    source.fill_(2)
    memory.zero_()
    replay()
    assert memory[:, 0].tolist() == [2, 0, 2, 2, 2, 2, 2, 0]
    assert out[:, 0].tolist() == [2, 2, 0]


def check_refusals(device: Device) -> None:
    """What crosses between host and device is refused in a capture, and the capture and the helper live on."""
    helper = _helper(device)
    memory, host = torch.zeros(8, 4, device=device.torch), torch.ones(8, 4)
    helper.copy(memory, host)
    said = []

    def work() -> None:
        memory.add_(1)
        for cross in (
            lambda: helper.rows([6, 1]),
            lambda: helper.copy(memory, host),
            lambda: helper.fetch([memory.view(torch.uint8).reshape(-1)]),
        ):
            with pytest.raises(RuntimeError) as error:
                cross()
            said.append(str(error.value).partition(" cannot be captured")[0])

    device.captured(work)
    assert said == ["a row index", "a host tensor", "a result for the host"]
    helper.put(memory, helper.rows([6, 1]), torch.full((2, 4), 3.0, device=device.torch))
    (block,) = helper.fetch([memory])
    assert block[[1, 6]].unique().tolist() == [3.0]


def test_captured_crossings_are_refused(device: Device) -> None:
    check_refusals(device)


@pytest.mark.hardware
def test_copies_are_on_the_current_stream(device: Device) -> None:
    helper = _warm(_helper(device))
    stream = torch.cuda.Stream()
    dests = [torch.zeros(4, device=device.torch) for _ in range(9)]
    host = torch.zeros(4)
    torch.cuda.synchronize()
    device.occupy()  # The default stream; the other one need not wait for it.
    with torch.cuda.stream(stream):
        for number, dest in enumerate(dests):
            helper.copy(dest, host.fill_(number))
        (block,) = helper.fetch([helper.pack(dests)])
        assert not torch.cuda.default_stream().query()
    assert [copy.tolist() for copy in helper.unpack(block, dests)] == [[float(number)] * 4 for number in range(9)]


# Mutants of the helper. On hardware a race may be won by chance, so they run where it is always lost.


def _pageable(staging: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    dest.copy_(source.to(dest.dtype), non_blocking=True)


def _blocking(staging: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    pinned = torch.empty(dest.shape, dtype=dest.dtype, pin_memory=True)
    pinned.copy_(source)
    dest.copy_(pinned)


def _reused_early(staging: Any, size: int) -> Any:
    slot = staging._slots[0]
    if slot.memory.numel() < size:
        slot.memory = torch.empty(max(4096, size), dtype=torch.uint8, pin_memory=True)
    return slot


def _on_current_device(staging: Any, dest: torch.Tensor, source: torch.Tensor) -> None:
    slot = staging._free_slot(dest.numel() * dest.element_size())
    staged = slot.memory[: dest.numel() * dest.element_size()].view(dest.dtype).view(dest.shape)
    staged.copy_(source)
    dest.copy_(staged, non_blocking=True)
    slot.event = torch.cuda.Event()
    slot.event.record()


def _not_waited_for(helper: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _one_by_one(helper: Any, blocks: Any) -> list[torch.Tensor]:
    return [block.to("cpu") for block in blocks]


def _left_on_device(helper: Any, tensors: Any) -> Any:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]) if len(tensors) > 1 else tensors[0]


def _many_writes(device: Device) -> None:
    check_writes(8, device)


def _many_results(device: Device) -> None:
    check_results(8, device)


@pytest.mark.standin
@pytest.mark.parametrize(
    ("check", "owner", "name", "mutated", "caught"),
    [
        (_many_writes, PinnedStaging, "upload", _pageable, r"\(2, 0, 2\) == \(2, 0, 0\)"),
        (_many_writes, PinnedStaging, "upload", _blocking, r"\(2, 0, 2\) == \(2, 0, 0\)"),
        (_many_writes, PinnedStaging, "_free_slot", _reused_early, r"\[2.0\], \[2.0\]"),
        (check_rotation, PinnedStaging, "_free_slot", _reused_early, "0 == 2"),
        (check_rotation, PinnedStaging, "upload", _on_current_device, "0 == 2"),
        (_many_results, CudaBufferHelper, "_to_host", _not_waited_for, r"\(0, 1, 0\) == \(0, 1, 1\)"),
        (_many_results, CudaBufferHelper, "fetch", _one_by_one, r"\(0, 2, 2\) == \(0, 1, 1\)"),
        (check_refusals, CudaBufferHelper, "_stage", StagedBufferHelper._stage, "not permitted"),
        (check_refusals, CudaBufferHelper, "copy", StagedBufferHelper.copy, "not permitted"),
        (check_refusals, CudaBufferHelper, "_to_host", BufferHelper._to_host, "not permitted"),
    ],
    ids=[
        "pageable-upload",
        "blocking-upload",
        "early-reuse",
        "early-reuse-counted",
        "event-of-another-device",
        "no-wait",
        "a-transfer-each",
        "captured-index",
        "captured-upload",
        "captured-fetch",
    ],
)
def test_mutants_of_the_helper_are_caught(
    check: Callable[[Device], None],
    owner: type,
    name: str,
    mutated: Any,
    caught: str,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mutated)
    with pytest.raises((AssertionError, RuntimeError), match=caught):
        check(device)
