# SPDX-License-Identifier: Apache-2.0
"""An emulated Ascend device: the real torch_npu on a stand-in for CANN, with counters and hazard detection.

What is shown on it is *emulated*, never 'tested on Ascend'.

Modelled, with torch_npu's own code running on it: one device 'Ascend910B3', its allocators, pinned memory, streams,
events, and copies in every direction, each counted with its bytes as synchronous or asynchronous. The device runs at
once, the host is kept behind: until the host has waited for an asynchronous copy of pinned memory, its destination
holds poison, and a changed source, an early read through :func:`check_host_read`, a freed block or two unordered
copies of the same bytes are recorded as hazards. Aten operators run on CPU tensors that alias device memory.

Not modelled: the numerics and cost of NPU kernels, aclnn paths, graph capture and replay, timing, races between
streams on device memory, attention, LSTM, more than one device. What is not modelled fails and names itself.

Use, in a process of its own and before anything imports torch_npu::

    from omni_npu_phase import emulated_ascend

    device = emulated_ascend.activate()
    with device.counting() as counting:
        ...
    assert counting.counts.host_syncs == 0
    counting.assert_no_hazards()

Needs torch-npu 2.13.0 beside a CPU build of torch 2.13, ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` in the environment if torch
is imported first, and a C compiler on first use. Everything it cannot or will not do is an :class:`EmulationError`.
"""

from __future__ import annotations

from omni_npu_phase.emulated_ascend.device import (
    SUPPORTED_TORCH_NPU,
    Counting,
    Counts,
    Device,
    activate,
    active_device,
    assert_no_hazards,
    check_host_read,
    counting,
)
from omni_npu_phase.emulated_ascend.errors import EmulationError

__all__ = [
    "SUPPORTED_TORCH_NPU",
    "Counting",
    "Counts",
    "Device",
    "EmulationError",
    "activate",
    "active_device",
    "assert_no_hazards",
    "check_host_read",
    "counting",
]
