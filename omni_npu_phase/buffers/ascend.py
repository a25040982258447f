# SPDX-License-Identifier: Apache-2.0
"""Buffer helper for Ascend NPUs, by torch_npu's rules: what makes the host wait there, and which indices it accepts.

A pageable copy synchronises in both directions, a pinned one only if it casts; ``index_copy_`` takes int64 indices on
the device. These rules were measured on torch_npu 2.13.0 with an emulated device, not on hardware.
"""

from __future__ import annotations

import torch

from omni_npu_phase.buffers.base import BufferHelper
from omni_npu_phase.buffers.staging import PinnedStaging


class AscendBufferHelper(BufferHelper):
    """Uploads go through rotating pinned memory and never synchronise; results come back in one transfer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._staging = PinnedStaging(device)
        self._index = torch.empty(0, dtype=torch.int64, device=device)

    def _stage(self, values: list[int]) -> torch.Tensor:
        if len(values) > self._index.numel():
            self._index = torch.empty(max(64, 2 * len(values)), dtype=torch.int64, device=self.device)
        index = self._index[: len(values)]
        self._staging.upload(index, torch.tensor(values, dtype=torch.int64))
        return index

    def copy(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self._staging.upload(dest, source)
        else:
            dest.copy_(source)


HELPER = AscendBufferHelper
