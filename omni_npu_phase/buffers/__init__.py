# SPDX-License-Identifier: Apache-2.0
"""Copy helpers by device type. The routing code knows rows and tensors; only a helper knows how its device copies.

:class:`~omni_npu_phase.buffers.base.BufferHelper` is the interface, and is correct on any device torch knows. A module
of this package may state, for one device type, only what differs there; it is imported when that device is in use.

What a helper keeps from step to step is an int64 index of the last scattered rows. Where uploads are staged, it also
keeps four pinned slots in host memory, each twice the largest upload it has carried.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from omni_npu_phase.buffers.base import BufferHelper

_MODULES = {
    "cpu": "omni_npu_phase.buffers.cpu",
    "cuda": "omni_npu_phase.buffers.cuda",
    "npu": "omni_npu_phase.buffers.staging",
}


def for_device(device: torch.device) -> BufferHelper:
    """The helper for tensors on ``device``; one per runner, since it owns staging memory (not thread-safe)."""
    module = importlib.import_module(_MODULES.get(device.type, "omni_npu_phase.buffers.base"))
    helper: BufferHelper = module.HELPER(device)
    return helper
