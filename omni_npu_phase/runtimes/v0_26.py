# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.26, V1 runners."""

from __future__ import annotations

from typing import Any

from omni_npu_phase.runtimes.v1 import v1_runtime


def write_duplex(info: dict[str, Any], request_id: str, prompt_len: int, num_computed: int, state: Any) -> None:
    info["request_id"] = request_id
    info["duplex_token_offset"] = num_computed
    info["duplex_prompt_len"] = prompt_len


RUNTIME = v1_runtime("0.26", seed_key="tts_local_seed", write_keywords=write_duplex)
