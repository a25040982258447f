# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.26, V1 runners."""

from __future__ import annotations

from omni_npu_phase.releases import HookRows
from omni_npu_phase.releases.v1 import v1_runtime


def write_duplex(rows: HookRows) -> None:
    for info, request_id, prompt_len, num_computed, _ in rows:
        info["request_id"] = request_id
        info["duplex_token_offset"] = num_computed
        info["duplex_prompt_len"] = prompt_len


RUNTIME = v1_runtime("0.26", seed_key="tts_local_seed", write_keywords=write_duplex)
