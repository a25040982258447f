# SPDX-License-Identifier: Apache-2.0
"""Buffer helper for Ascend NPUs, by torch_npu's rules: what makes the host wait there, and which indices it accepts.

A pageable copy synchronises in both directions, a pinned one only if it casts; ``index_copy_`` takes int64 indices on
the device. These rules were measured on torch_npu 2.13.0 with an emulated device, not on hardware.
"""

from __future__ import annotations

from omni_npu_phase.buffers.staging import StagedBufferHelper


class AscendBufferHelper(StagedBufferHelper):
    """Uploads never synchronise; results come back in one transfer, whose wait the pageable copy brings with it."""


HELPER = AscendBufferHelper
