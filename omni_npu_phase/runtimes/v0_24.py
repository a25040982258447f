# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.24, V1 runners."""

from __future__ import annotations

from typing import Any

from omni_npu_phase.runtimes import Runtime, v1


def _write_keywords(info: dict[str, Any], request_id: str, prompt_len: int, num_computed: int, state: Any) -> None:
    info["request_id"] = request_id


RUNTIME = Runtime(
    name="vLLM-Omni 0.24 (V1)",
    # The last two are not called: 0.22 lacks the first, and the second went with 0.26.
    methods={**v1.METHODS, "_to_list": (), "_merge_additional_information_update": ("req_id", "upd")},
    preprocess_values=v1.PREPROCESS_VALUES,
    seed_key="tts_local_seed",
    write_keywords=_write_keywords,
    attach_infos=v1.attach_infos,
    mtp_graph=v1.mtp_graph,
    is_graph=v1.is_graph,
    eager=v1.eager,
    forward_context=v1.forward_context,
)
