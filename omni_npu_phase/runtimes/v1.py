# SPDX-License-Identifier: Apache-2.0
"""What the V1 runners of all known releases have in common; a release states only how it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from omni_npu_phase.runtimes import Runtime

_METHODS = {
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
_PREPROCESS_VALUES = 6


def v1_runtime(
    name: str,
    *,
    marks: Mapping[str, tuple[str, ...]],
    seed_key: str,
    write_keywords: Callable[[dict[str, Any], str, int, int, Any], None],
) -> Runtime:
    """A release's runtime; ``marks`` are methods that are not called but tell it from other releases."""
    return Runtime(
        name=name,
        methods={**_METHODS, **marks},
        preprocess_values=_PREPROCESS_VALUES,
        seed_key=seed_key,
        write_keywords=write_keywords,
        attach_infos=_attach_infos,
        mtp_graph=_mtp_graph,
        is_graph=_is_graph,
        eager=_eager,
        forward_context=_forward_context,
    )


def _attach_infos(runner: Any, request_id: str, info: dict[str, Any]) -> dict[str, Any]:
    attached: dict[str, Any] = runner._maybe_attach_mimo_audio_req_infos(
        runner.requests.get(request_id), info, request_id
    )
    return attached


def _mtp_graph(runner: Any, rows: int) -> tuple[Any, Any, int]:
    mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=rows,
        num_reqs=rows,
        num_scheduled_tokens_np=np.ones(rows, dtype=np.int32),
        max_num_scheduled_tokens=1,
        use_cascade_attn=False,
    )
    return mode, descriptor, getattr(descriptor, "num_tokens", rows)


def _is_graph(runner: Any) -> bool:
    from vllm_omni.platforms import current_omni_platform

    return isinstance(runner.talker_mtp, current_omni_platform.get_graph_wrapper_cls())


def _eager() -> Any:
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.NONE


def _forward_context(vllm_config: Any, mode: Any, descriptor: Any) -> AbstractContextManager[Any]:
    from vllm_omni.platforms import current_omni_platform

    context: AbstractContextManager[Any] = current_omni_platform.set_forward_context(
        None, vllm_config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
    )
    return context
