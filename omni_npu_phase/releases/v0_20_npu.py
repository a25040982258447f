# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.20, V1 NPU runners: their MTP step is a copy of their own, without seeds; the mixin's serves both."""

from __future__ import annotations

from omni_npu_phase.releases.v1 import v1_runtime, write_request_id

RUNTIME = v1_runtime(
    "0.20",
    runner="V1, NPU",
    seed_key="qwen3_tts_request_seed",
    write_keywords=write_request_id,
    mtp_parameters=("decode_req_ids", "inputs_embeds"),
    mtp_names=("ACLGraphWrapper", "set_ascend_forward_context"),
    mtp_seeds=False,
    batched_hooks=False,
    graph_wrapper="vllm_omni.platforms.npu.worker.npu_model_runner:ACLGraphWrapper",
    forward_context="vllm_omni.platforms.npu.worker.npu_model_runner:set_ascend_forward_context",
    mode_keyword="aclgraph_runtime_mode",
)
