# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.30, V1 runners."""

from __future__ import annotations

from omni_npu_phase.releases.v0_28 import write_sampling
from omni_npu_phase.releases.v1 import MTP_NAMES, v1_runtime

RUNTIME = v1_runtime(
    "0.30",
    seed_key="tts_local_seed",
    write_keywords=write_sampling,
    # Its MTP step stores a validity mark beside the codes; releases before it know none.
    mtp_names=(*MTP_NAMES, "talker_mtp_validity_key"),
)
