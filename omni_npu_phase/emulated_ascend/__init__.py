# SPDX-License-Identifier: Apache-2.0
"""An emulated Ascend device: the real torch_npu on a stand-in for CANN, with counters and hazard detection.

What is shown on it is *emulated*, never 'tested on Ascend'.

**How.** torch_npu reaches an NPU through the C functions of CANN. Small libraries (`acl.c`, `answers.c`, `atb.c`) take
CANN's place before the real torch_npu is imported. Host memory plays device memory there. torch_npu's own allocators,
pinned memory, streams, events and copies run on it unchanged; each copy is counted with its bytes, as synchronous or
asynchronous. Where torch_npu would launch a kernel, PyTorch's CPU kernel computes on the same memory (`kernels.py`,
`operators.py`), or a function of this package does (`models.py`). `graphs.py` has captured graphs, `engine.py` what a
whole engine of vLLM-Ascend needs.

**Order.** A real device works while the host goes on, so a host that does not wait may see anything. Here it sees the
worst. A kernel or copy is done when its call returns, with two exceptions, both copies of pinned memory:

* A copy to the host leaves poison in its destination until the host has waited for it.
* A copy to the device reads its source late, when the device next uses its memory. What the host has written there in
  the meantime is what arrives.

A destination read early, a source changed early, a block freed early, and two copies of the same bytes that nothing
orders are recorded as hazards. Early reads of host tensors are seen where :func:`check_host_read` is asked.

**Not modelled**: numerics and cost of NPU kernels, aclnn paths, graphs with attention in them, timing, races between
streams on device memory, recurrent layers, more than one device. What is not modelled fails and names itself.

Use it in a process of its own, before anything imports torch_npu::

    from omni_npu_phase import emulated_ascend

    device = emulated_ascend.activate()
    with device.counting() as counting:
        ...
    assert counting.counts.host_syncs == 0
    counting.assert_no_hazards()

It needs a torch_npu of :data:`SUPPORTED_TORCH_NPU` with the torch that belongs to it, a C compiler on first use, and
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` in the environment if torch is imported first. Whatever it cannot or will not do is
an :class:`EmulationError`.
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
