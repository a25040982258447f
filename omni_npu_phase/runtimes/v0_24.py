# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.24, V1 runners."""

from __future__ import annotations

from typing import Any

from omni_npu_phase.runtimes.v1 import v1_runtime


def _write_keywords(info: dict[str, Any], request_id: str, prompt_len: int, num_computed: int, state: Any) -> None:
    info["request_id"] = request_id


RUNTIME = v1_runtime(
    "vLLM-Omni 0.24 (V1)",
    # 0.22 lacks the first, and the second went with 0.26.
    marks={"_to_list": (), "_merge_additional_information_update": ("req_id", "upd")},
    seed_key="tts_local_seed",
    write_keywords=_write_keywords,
)
