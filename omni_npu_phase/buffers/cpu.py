# SPDX-License-Identifier: Apache-2.0
"""Buffer helper for runners whose device memory is host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from omni_npu_phase.buffers.base import BufferHelper


class CpuBufferHelper(BufferHelper):
    """Indices are staged in one reused array, and an owned block already is host memory.

    A host tensor is not owned for being on the host: here the MTP's output buffer is host memory too (T9).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._staging = np.empty(0, dtype=np.int64)

    @property
    def held_bytes(self) -> int:
        return self._padding.nbytes + self._staging.nbytes

    def _stage(self, values: list[int]) -> torch.Tensor:
        if len(values) > len(self._staging):
            self._staging = np.empty(max(64, 2 * len(values)), dtype=np.int64)
        staged = self._staging[: len(values)]
        staged[:] = values
        return torch.from_numpy(staged)

    def copy_all(self, dests: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(dests, sources)

    def fetch(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(blocks)


HELPER = CpuBufferHelper
