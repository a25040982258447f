# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.22, V1 runners."""

from __future__ import annotations

from omni_npu_phase.releases.v1 import v1_runtime, write_request_id

RUNTIME = v1_runtime(
    "0.22",
    seed_key="qwen3_tts_request_seed",
    write_keywords=write_request_id,
    mtp_names=("current_omni_platform",),
)
