# SPDX-License-Identifier: Apache-2.0
"""What vLLM-Omni asks of a platform, answered for a CPU."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from omni_npu_phase.platform.vllm_cpu import CpuPlatform


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """Named by :func:`omni_npu_phase.platform.omni_platform`; autoregressive and generation stages, no diffusion."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "omni_npu_phase.platform.worker.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "omni_npu_phase.platform.worker.CpuGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        raise NotImplementedError("the CPU platform of omni-npu-phase runs no diffusion stages")

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Everything on a CPU has already happened."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
