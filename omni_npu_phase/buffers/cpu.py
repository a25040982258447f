# SPDX-License-Identifier: Apache-2.0
"""Buffer helper for runners whose device memory is host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_npu_phase.buffers.base import BufferHelper


class CpuBufferHelper(BufferHelper):
    """Several copies are one operation, and an owned block already is host memory.

    A host tensor is not owned for being on the host: here the MTP's output buffer is host memory too (T9).
    """

    def copy_all(self, dests: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if torch.is_grad_enabled():
            # The one operation has no derivative, which a source may ask for where there is no inference mode.
            super().copy_all(dests, sources)
        else:
            torch._foreach_copy_(dests, sources)

    def fetch(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(blocks)


HELPER = CpuBufferHelper
