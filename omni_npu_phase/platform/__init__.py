# SPDX-License-Identifier: Apache-2.0
"""A CPU platform for unmodified vLLM-Omni 0.30, with the phase contract in its runners.

For tests, and to serve small models where there is no accelerator. Nothing of it is active unless
``OMNI_NPU_PHASE_PLATFORM=cpu`` is set in the environment of the process that starts the engine.
"""

from __future__ import annotations

import os

from omni_npu_phase.settings import PLATFORM_VARIABLE


def vllm_platform() -> str | None:
    """Entry point of vLLM's group ``vllm.platform_plugins``: the class to use, or None where not asked for."""
    return "omni_npu_phase.platform.vllm_cpu.CpuPlatform" if _asked_for() else None


def omni_platform() -> str | None:
    """Entry point of vLLM-Omni's group ``vllm_omni.platform_plugins``: the class, or None where not asked for."""
    if not _asked_for():
        return None
    from omni_npu_phase.standins import torchaudio, torchvision

    # vLLM-Omni resolves its platform before it imports a model, and so before anything here is needed.
    torchaudio.install()
    torchvision.install()
    return "omni_npu_phase.platform.omni_cpu.CpuOmniPlatform"


def _asked_for() -> bool:
    return os.environ.get(PLATFORM_VARIABLE) == "cpu"
