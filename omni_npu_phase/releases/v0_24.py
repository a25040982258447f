# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.24, V1 runners."""

from __future__ import annotations

from omni_npu_phase.releases.v1 import v1_runtime, write_request_id

RUNTIME = v1_runtime("0.24", seed_key="tts_local_seed", write_keywords=write_request_id)
