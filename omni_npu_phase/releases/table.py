# SPDX-License-Identifier: Apache-2.0
"""What differs between the V1 runners of vLLM-Omni releases: one row a release, in :data:`RUNTIMES`.

A row states names and values, and says with what else the release is installed. It never decides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

EAGER = "vllm.config:CUDAGraphMode.NONE"
_DUPLEX = "request_id duplex_token_offset duplex_prompt_len"
_ROW_MTP = "current_omni_platform talker_mtp_accepts_req_infos talker_mtp_accepts_per_row_generators req_id_to_index"
_PLATFORM = "vllm_omni.platforms:current_omni_platform"
_GPU = "vllm_omni.worker.gpu_model_runner"
_NPU = "vllm_omni.platforms.npu.worker.npu_model_runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One release: what the mixin takes from its runner under another name, or with another value, than elsewhere.

    Defaults are what most releases have. Several names are one string; places in code are written ``module:name``.
    """

    release: str
    """Major and minor version of vLLM-Omni."""
    vllm: str
    """The vLLM that it is installed with."""
    vllm_ascend: str | None
    """The vLLM-Ascend that it is installed with; None where there is none yet."""
    runner: str = "V1"
    seed_key: str = "tts_local_seed"
    """Name of a request's own MTP seed in its sampling parameters' ``extra_args`` (T8)."""
    keywords: str = f"{_DUPLEX} _omni_max_tokens _omni_seed"
    """What hooks are told beside the three fields."""
    batched_hooks: bool = True
    """Whether the runner calls hooks for a whole step."""
    fills_rows: bool = False
    """Whether ``preprocess_batch`` may write rows itself; the released runner then gives them no other hook."""
    step_names: str = ""
    """What the code of ``_preprocess`` names beside what it names in every release."""
    mtp_parameters: str = "decode_req_ids inputs_embeds start_offsets"
    """What the runner's MTP step is called with."""
    mtp_names: str = f"{_ROW_MTP} talker_mtp_validity_key"
    """What the code of that MTP step names beside what it names in every release."""
    mtp_seeds: bool = True
    """Whether that step draws from requests' own generators."""
    graph_wrapper: str = f"{_PLATFORM}.get_graph_wrapper_cls"
    """Where the class of captured MTP graphs is, or a function that returns it."""
    mtp_context: str = f"{_PLATFORM}.set_forward_context"
    """Where the function is that makes the context MTP runs in."""
    mode_keyword: str = "cudagraph_runtime_mode"
    """What that function calls the graph mode."""

    @property
    def name(self) -> str:
        return f"vLLM-Omni {self.release} ({self.runner})"

    def write_keywords(self, rows: Iterable[tuple[dict[str, Any], str, int, int, Any]]) -> None:
        """Write ``keywords`` into live buffers. Of each row: its buffer, request id, P, C and request state."""
        duplex, limits = "duplex_prompt_len" in self.keywords, "_omni_seed" in self.keywords
        for info, request_id, prompt_len, num_computed, state in rows:
            info["request_id"] = request_id
            if duplex:
                info["duplex_token_offset"] = num_computed
                info["duplex_prompt_len"] = prompt_len
            if limits:
                sampling = getattr(state, "sampling_params", None)
                info["_omni_max_tokens"] = getattr(sampling, "max_tokens", None)
                info["_omni_seed"] = getattr(sampling, "seed", None)

    def mtp_graph(self, runner: Any, rows: int) -> tuple[Any, Any, int]:
        """Graph mode, batch descriptor and padded size of an MTP batch."""
        # For a few rows np.ones takes several times as long.
        spans = np.empty(rows, dtype=np.int32)
        spans.fill(1)
        mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=rows,
            num_reqs=rows,
            num_scheduled_tokens_np=spans,
            max_num_scheduled_tokens=1,
            use_cascade_attn=False,
        )
        return mode, descriptor, getattr(descriptor, "num_tokens", rows)

    def is_graph(self, runner: Any) -> bool:
        """Whether the runner's MTP is wrapped for capture and replay."""
        wrapper = _found(self.graph_wrapper)
        return isinstance(runner.talker_mtp, wrapper if isinstance(wrapper, type) else wrapper())

    def eager(self) -> Any:
        """The graph mode in which a wrapped MTP runs its model directly."""
        return _found(EAGER)

    def forward_context(self, vllm_config: Any, mode: Any, descriptor: Any) -> AbstractContextManager[Any]:
        """The context MTP runs in."""
        graph = {self.mode_keyword: mode, "batch_descriptor": descriptor}
        context: AbstractContextManager[Any] = _found(self.mtp_context)(None, vllm_config, **graph)
        return context


# No phase fields and no guard: the mixin brings them.
_GPU_0_20 = Runtime(
    release="0.20",
    vllm="0.20.2",
    vllm_ascend="0.20.2rc1",
    mtp_names="CUDAGraphWrapper set_forward_context",
    mtp_parameters="decode_req_ids inputs_embeds",
    keywords="request_id",
    seed_key="qwen3_tts_request_seed",
    batched_hooks=False,
    graph_wrapper=f"{_GPU}:CUDAGraphWrapper",
    mtp_context=f"{_GPU}:set_forward_context",
)
# Its NPU runners have an MTP step of their own.
_NPU_0_20 = replace(
    _GPU_0_20,
    runner="V1, NPU",
    mtp_names="ACLGraphWrapper set_ascend_forward_context",
    mtp_seeds=False,
    graph_wrapper=f"{_NPU}:ACLGraphWrapper",
    mtp_context=f"{_NPU}:set_ascend_forward_context",
    mode_keyword="aclgraph_runtime_mode",
)
RUNTIMES = (
    Runtime(release="0.32", vllm="0.32.0", vllm_ascend=None, step_names="index_to_device", fills_rows=True),
    Runtime(release="0.31", vllm="0.31.0", vllm_ascend=None, step_names="index_to_device"),
    Runtime(release="0.30", vllm="0.30.0", vllm_ascend="0.30.0rc2"),
    Runtime(release="0.28", vllm="0.28.0", vllm_ascend="0.28.0rc1", mtp_names=_ROW_MTP),
    Runtime(release="0.26", vllm="0.26.0", vllm_ascend="0.26.0rc1", mtp_names=_ROW_MTP, keywords=_DUPLEX),
    Runtime(release="0.24", vllm="0.24.0", vllm_ascend="0.24.0rc1", mtp_names=_ROW_MTP, keywords="request_id"),
    Runtime(
        release="0.22",
        vllm="0.22.1",
        vllm_ascend="0.22.1rc1",
        mtp_names="current_omni_platform",
        keywords="request_id",
        seed_key="qwen3_tts_request_seed",
    ),
    _GPU_0_20,
    _NPU_0_20,
)
"""The newest release first."""


def release_of(version: str | None) -> str | None:
    """Major and minor of a version, of candidates and source builds too; None where a source build does not know it.

    Without the repository's tags a source build calls itself ``0.1.dev...``, whatever release it is.
    """
    found = re.match(r"(?!0\.[01]\.dev)(\d+\.\d+)", version or "")
    return found.group(1) if found else None


def _found(where: str) -> Any:
    """What ``module:name`` stands for now, in a module that the runner's own modules have imported."""
    module, _, name = where.partition(":")
    return attrgetter(name)(sys.modules[module])
