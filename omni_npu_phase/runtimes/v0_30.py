# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.30, V1 runners."""

from __future__ import annotations

from typing import Any

from omni_npu_phase.runtimes import Runtime, v1


def _write_keywords(info: dict[str, Any], request_id: str, prompt_len: int, num_computed: int, state: Any) -> None:
    sampling = getattr(state, "sampling_params", None)
    info["request_id"] = request_id
    info["duplex_token_offset"] = num_computed
    info["duplex_prompt_len"] = prompt_len
    info["_omni_max_tokens"] = getattr(sampling, "max_tokens", None)
    info["_omni_seed"] = getattr(sampling, "seed", None)


RUNTIME = Runtime(
    name="vLLM-Omni 0.30 (V1)",
    # The last is not called; it came with 0.30 and tells it from its predecessors.
    methods={**v1.METHODS, "_report_model_local_kv": ()},
    preprocess_values=v1.PREPROCESS_VALUES,
    seed_key="tts_local_seed",
    write_keywords=_write_keywords,
    attach_infos=v1.attach_infos,
    mtp_graph=v1.mtp_graph,
    is_graph=v1.is_graph,
    eager=v1.eager,
    forward_context=v1.forward_context,
)
