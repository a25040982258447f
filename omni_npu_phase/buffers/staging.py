# SPDX-License-Identifier: Apache-2.0
"""Pinned staging memory for uploads that must not make the host wait, and the buffer helper for Ascend NPUs.

On torch_npu a pageable copy synchronises in both directions, and a pinned one if it casts; ``index_copy_`` takes int64
indices on the device. These rules were measured on torch_npu 2.13.0 with an emulated device, not on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from omni_npu_phase.buffers.base import BufferHelper

_SLOTS = 4
_SMALLEST = 4096


@dataclass(slots=True)
class _Slot:
    memory: torch.Tensor
    event: Any
    """Recorded behind the slot's last upload; None before its first."""


class PinnedStaging:
    """Rotating pinned slots of one device. A slot is written again only when the upload that read it is done.

    That wait is the only one; with no more uploads a step than slots, it is for an upload of an earlier step.
    Host memory: ``slots`` times twice the largest upload.
    """

    def __init__(self, device: torch.device, slots: int = _SLOTS) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._slots = [_Slot(torch.empty(0, dtype=torch.uint8), None) for _ in range(slots)]
        self._turn = 0

    def upload(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a host tensor to a device tensor of the same shape without synchronising.

        The cast to the destination's dtype happens on the host: a pinned copy that casts synchronises on torch_npu.
        ``source`` may be changed as soon as this returns.
        """
        size = dest.numel() * dest.element_size()
        if not size:
            return
        slot = self._free_slot(size)
        staged = slot.memory[:size].view(dest.dtype).view(dest.shape)
        staged.copy_(source)
        dest.copy_(staged, non_blocking=True)
        if slot.event is None:
            slot.event = self._module.Event()
        # The copy is on the stream of its own device, which need not be the current one.
        slot.event.record(self._module.current_stream(self._device))

    def _free_slot(self, size: int) -> _Slot:
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        if slot.event is not None and not slot.event.query():
            slot.event.synchronize()
        if slot.memory.numel() < size:
            slot.memory = torch.empty(max(_SMALLEST, 2 * size), dtype=torch.uint8, pin_memory=True)
        return slot


class StagedBufferHelper(BufferHelper):
    """For devices that work while the host goes on: uploads go through rotating pinned memory, without a wait.

    Results come back in one transfer, whose wait a pageable copy brings with it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._staging = PinnedStaging(device)

    def _stage(self, values: list[int]) -> torch.Tensor:
        index = torch.empty(len(values), dtype=torch.int64, device=self.device)
        self._staging.upload(index, torch.tensor(values))
        return index

    def _write(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self._staging.upload(dest, source)
        else:
            dest.copy_(source)


HELPER = StagedBufferHelper
