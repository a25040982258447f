# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.20, V1 runners: no phase fields, no guard, no batched hook; the mixin brings them."""

from __future__ import annotations

from omni_npu_phase.releases.v1 import v1_runtime, write_request_id

RUNTIME = v1_runtime(
    "0.20",
    seed_key="qwen3_tts_request_seed",
    write_keywords=write_request_id,
    mtp_parameters=("decode_req_ids", "inputs_embeds"),
    # Its runner names both itself; platforms came to supply them with 0.22.
    mtp_names=("CUDAGraphWrapper", "set_forward_context"),
    batched_hooks=False,
    graph_wrapper="vllm_omni.worker.gpu_model_runner:CUDAGraphWrapper",
    forward_context="vllm_omni.worker.gpu_model_runner:set_forward_context",
)
