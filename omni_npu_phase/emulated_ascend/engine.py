# SPDX-License-Identifier: Apache-2.0
"""An engine of vLLM-Ascend on the emulated device, in every process of it.

Two entry points, which do nothing unless ``OMNI_NPU_PHASE_PLATFORM=emulated_ascend`` is set. vLLM and vLLM-Omni ask for
a platform before they import a worker or a model: :func:`platform` then gives the process its device and leaves the
choice of platform to vLLM-Ascend. vLLM's general plug-ins follow: :func:`models` replaces what vLLM-Ascend would take
from its compiled extension and from Triton, neither of which is there.

Everything else of vLLM, vLLM-Omni and vLLM-Ascend is the released code. Results are *emulated*, never 'tested on
Ascend'.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from omni_npu_phase.settings import PLATFORM_VARIABLE

if TYPE_CHECKING:
    import torch

PLATFORM = "emulated_ascend"
ENVIRONMENT = {
    PLATFORM_VARIABLE: PLATFORM,
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TASK_QUEUE_ENABLE": "0",
}
"""Of every process of an engine, before it starts."""


def platform() -> None:
    """Entry point of the groups ``vllm.platform_plugins`` and ``vllm_omni.platform_plugins``: never a platform."""
    if os.environ.get(PLATFORM_VARIABLE) != PLATFORM:
        return
    from omni_npu_phase import emulated_ascend

    try:
        emulated_ascend.activate()
        _stand_in()
    except Exception as error:
        # vLLM keeps the errors of such an entry point to itself.
        sys.stderr.write(f"omni-npu-phase: no emulated Ascend device: {error}\n")
        raise


def models() -> None:
    """Entry point of the group ``vllm.general_plugins``."""
    if os.environ.get(PLATFORM_VARIABLE) != PLATFORM:
        return
    import vllm_ascend.utils
    import vllm_ascend.worker.block_table

    # Its fused kernels are compiled; where they are missing vLLM-Ascend takes those of torch_npu.
    vllm_ascend.utils._CUSTOM_OP_ENABLED = False
    vllm_ascend.worker.block_table._compute_slot_mapping_kernel = _Kernel(compute_slot_mapping)


def _stand_in() -> None:
    from omni_npu_phase.standins import stand_in, torchaudio, torchvision

    torchaudio.install()
    torchvision.install()
    # CANN's own Python package and one of recurrent layers: both are imported, and not used by a talker.
    stand_in("acl", "acl.rt", names={"memcpy": _absent})
    names = ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule_fwd", "recurrent_gated_delta_rule")
    stand_in("fla_npu", "fla_npu.ops", "fla_npu.ops.ascendc", names=dict.fromkeys(names, _absent))
    # Layers import it for the operator that models.py has.
    sys.modules["vllm_ascend.vllm_ascend_C"] = ModuleType("vllm_ascend.vllm_ascend_C")


def _absent(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("the emulated Ascend device has no CANN and no fla_npu")


class _Kernel:
    """A Triton kernel's place, with a function of the same arguments in it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,  # noqa: N803 - the kernel's names
    PAD_ID: int,  # noqa: N803
    IS_CIRCULAR: bool = False,  # noqa: N803
    **_: Any,
) -> None:
    """Where each scheduled token's key and value go in the cache; a model of vLLM-Ascend's kernel of that name."""
    if TOTAL_CP_WORLD_SIZE != 1 or IS_CIRCULAR:
        raise NotImplementedError("slots are modelled without context parallelism and without circular blocks")
    from omni_npu_phase.emulated_ascend.kernels import host_alias

    slots, table, places = host_alias(slot_mapping), host_alias(block_table), host_alias(positions).long()
    slots[num_tokens:max_num_tokens] = PAD_ID
    starts = host_alias(query_start_loc).tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        if start < end and row < table.shape[0]:
            place = places[start:end]
            block = table[row, place // block_size].long()
            slots[start:end] = (block * block_size + place % block_size).to(slots.dtype)
