# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.28, V1 runners."""

from __future__ import annotations

from omni_npu_phase.releases import HookRows
from omni_npu_phase.releases.v1 import v1_runtime


def write_sampling(rows: HookRows) -> None:
    for info, request_id, prompt_len, num_computed, state in rows:
        sampling = getattr(state, "sampling_params", None)
        info["request_id"] = request_id
        info["duplex_token_offset"] = num_computed
        info["duplex_prompt_len"] = prompt_len
        info["_omni_max_tokens"] = getattr(sampling, "max_tokens", None)
        info["_omni_seed"] = getattr(sampling, "seed", None)


RUNTIME = v1_runtime("0.28", seed_key="tts_local_seed", write_keywords=write_sampling)
