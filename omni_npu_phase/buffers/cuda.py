# SPDX-License-Identifier: Apache-2.0
"""Buffer helper for CUDA devices: what is on its way to the host must be waited for, and what is captured is replayed.

A copy from the device to pinned memory returns before it is done; one to pageable memory makes the host wait inside it.
A captured copy from the host is replayed from the same address, whatever lies there by then.
"""

from __future__ import annotations

from typing import Any

import torch

from omni_npu_phase.buffers.staging import StagedBufferHelper


class CudaBufferHelper(StagedBufferHelper):
    """Copies go both ways through pinned memory on the current stream; the host waits once, for its results.

    Copies within the device may be captured into a graph. What would cross between host and device raises RuntimeError
    then, and leaves the capture as it is.
    """

    def _stage(self, values: list[int]) -> torch.Tensor:
        _refuse_capture("a row index")
        return super()._stage(values)

    def _write(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        if source.is_cpu:
            _refuse_capture("a host tensor")
        super()._write(dest, source)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        _refuse_capture("a result for the host")
        # Of its own, for another thread may fetch at the same time; torch keeps freed pinned memory for the next.
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        landing.copy_(tensor, non_blocking=True)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))
        done.synchronize()
        # Results live as long as their requests, and pinned memory is scarce.
        return landing.clone()


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} cannot be captured into a CUDA graph: a replay would not see what it holds then")


HELPER = CudaBufferHelper
