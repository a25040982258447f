# SPDX-License-Identifier: Apache-2.0
"""What the V1 runners of all known releases have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

METHODS = {
    "_preprocess": ("scheduler_output", "num_input_tokens", "intermediate_tensors"),
    "_talker_mtp_forward": ("decode_req_ids", "inputs_embeds", "start_offsets"),
    "_update_intermediate_buffer": ("req_id", "upd"),
    "_collect_additional_information_for_prefill": ("num_scheduled_tokens_np",),
    "_maybe_attach_mimo_audio_req_infos": ("req_state", "req_infos", "req_id"),
    "_determine_batch_execution_and_padding": (
        "num_tokens",
        "num_reqs",
        "num_scheduled_tokens_np",
        "max_num_scheduled_tokens",
        "use_cascade_attn",
    ),
}
PREPROCESS_VALUES = 6


def attach_infos(runner: Any, request_id: str, info: dict[str, Any]) -> dict[str, Any]:
    attached: dict[str, Any] = runner._maybe_attach_mimo_audio_req_infos(
        runner.requests.get(request_id), info, request_id
    )
    return attached


def mtp_graph(runner: Any, rows: int) -> tuple[Any, Any, int]:
    mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=rows,
        num_reqs=rows,
        num_scheduled_tokens_np=np.ones(rows, dtype=np.int32),
        max_num_scheduled_tokens=1,
        use_cascade_attn=False,
    )
    return mode, descriptor, getattr(descriptor, "num_tokens", rows)


def is_graph(runner: Any) -> bool:
    from vllm_omni.platforms import current_omni_platform

    return isinstance(runner.talker_mtp, current_omni_platform.get_graph_wrapper_cls())


def eager() -> Any:
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.NONE


def forward_context(vllm_config: Any, mode: Any, descriptor: Any) -> AbstractContextManager[Any]:
    from vllm_omni.platforms import current_omni_platform

    context: AbstractContextManager[Any] = current_omni_platform.set_forward_context(
        None, vllm_config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
    )
    return context
