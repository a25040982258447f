# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform, with asynchronous scheduling left as it was asked for."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform as ReleasedCpuPlatform


class CpuPlatform(ReleasedCpuPlatform):  # type: ignore[misc]
    """Named by :func:`omni_npu_phase.platform.vllm_platform`."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As released, but ``async_scheduling`` stays: runners that are tested here use it on their devices."""
        scheduler = vllm_config.scheduler_config
        asynchronous = bool(scheduler.async_scheduling)
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = asynchronous
