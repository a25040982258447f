# SPDX-License-Identifier: Apache-2.0
"""What the V1 runners of all known releases have in common; a release states only how it differs."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from omni_npu_phase.releases import HookRows, Runtime, Taken

_PREPROCESS_VALUES = 6
MTP_NAMES = (
    "current_omni_platform",
    "talker_mtp_accepts_req_infos",
    "talker_mtp_accepts_per_row_generators",
    "req_id_to_index",
)
"""What the MTP step of releases since 0.24 names beside what that of all releases does."""
_EAGER = "vllm.config:CUDAGraphMode.NONE"


def write_request_id(rows: HookRows) -> None:
    """The one further hook keyword of releases up to 0.24."""
    for info, request_id, *_ in rows:
        info["request_id"] = request_id


def v1_runtime(
    release: str,
    *,
    seed_key: str,
    write_keywords: Callable[[HookRows], None],
    mtp_parameters: tuple[str, ...] = ("decode_req_ids", "inputs_embeds", "start_offsets"),
    mtp_names: tuple[str, ...] = MTP_NAMES,
    mtp_seeds: bool = True,
    batched_hooks: bool = True,
    graph_wrapper: str = "vllm_omni.platforms:current_omni_platform.get_graph_wrapper_cls",
    forward_context: str = "vllm_omni.platforms:current_omni_platform.set_forward_context",
    mode_keyword: str = "cudagraph_runtime_mode",
    runner: str = "V1",
) -> Runtime:
    """A release's runtime.

    ``mtp_names``: what its MTP step names beside what that of all releases does. ``mtp_seeds``: whether it draws from
    requests' own generators. ``batched_hooks``: whether it calls hooks for a whole step.
    ``graph_wrapper``: where the class of captured MTP graphs is, or a function that gives it,
    and ``forward_context`` where the function is that gives MTP its context; both as ``module:name``. ``mode_keyword``:
    how that function calls the graph mode.
    """
    keywords: dict[str, Any] = {}
    write_keywords([(keywords, "", 0, 0, None)])
    methods = {
        "_preprocess": Taken(
            ("scheduler_output", "num_input_tokens", "intermediate_tensors"),
            names=(
                *("input_batch", "req_ids", "requests", "query_start_loc", "num_scheduled_tokens"),
                *("model", "has_preprocess", "preprocess", "input_embeds", "model_intermediate_buffer"),
                *("input_ids", "inputs_embeds", "has_talker_mtp", "mtp_inputs"),
                *(("preprocess_decode_batch",) if batched_hooks else ()),
                *keywords,
            ),
        ),
        "_talker_mtp_forward": Taken(
            mtp_parameters,
            names=(
                *("talker_mtp", "talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step"),
                *("requests", "vllm_config", "sampling_params", "subtalker_sampling_params", "talker_mtp_output_key"),
                *(("extra_args", "generator", seed_key) if mtp_seeds else ()),
                *mtp_names,
            ),
        ),
        "_update_intermediate_buffer": Taken(
            ("req_id", "upd"),
            names=(
                *("requests", "model_intermediate_buffer", "additional_information_cpu"),
                "gpu_resident_buffer_keys",
            ),
        ),
        "_collect_additional_information_for_prefill": Taken(
            ("num_scheduled_tokens_np",),
            names=("requests", "prompt_embeds_cpu", "num_computed_tokens_cpu", "prompt_token_ids", "inputs_embeds"),
        ),
        "_maybe_attach_mimo_audio_req_infos": Taken(("req_state", "req_infos", "req_id")),
        "_determine_batch_execution_and_padding": Taken(
            (
                "*",
                "num_tokens",
                "num_reqs",
                "num_scheduled_tokens_np",
                "max_num_scheduled_tokens",
                "use_cascade_attn",
            )
        ),
        "_process_additional_information_updates": Taken(),
        **({"_maybe_run_batch_preprocess": Taken(names=("preprocess_batch",))} if batched_hooks else {}),
    }
    functions = {
        graph_wrapper: Taken(()),
        forward_context: Taken(("attn_metadata", "vllm_config", "*", mode_keyword, "batch_descriptor")),
        _EAGER: Taken(),
    }

    def is_graph(runner: Any) -> bool:
        wrapper = _found(graph_wrapper)
        return isinstance(runner.talker_mtp, wrapper if isinstance(wrapper, type) else wrapper())

    def context(vllm_config: Any, mode: Any, descriptor: Any) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = _found(forward_context)(
            None, vllm_config, batch_descriptor=descriptor, **{mode_keyword: mode}
        )
        return entered

    return Runtime(
        name=f"vLLM-Omni {release} ({runner})",
        release=release,
        methods=methods,
        functions=functions,
        preprocess_values=_PREPROCESS_VALUES,
        seed_key=seed_key,
        keywords=tuple(keywords),
        write_keywords=write_keywords,
        attach_infos=operator.attrgetter("_maybe_attach_mimo_audio_req_infos"),
        mtp_graph=_mtp_graph,
        is_graph=is_graph,
        eager=lambda: _found(_EAGER),
        forward_context=context,
    )


def _found(where: str) -> Any:
    """What ``module:name`` stands for now."""
    module, get = _place(where)
    return get(module)


# Asked for in every step: only the look-up itself is left to do there.
@cache
def _place(where: str) -> tuple[ModuleType, Callable[[Any], Any]]:
    module, _, name = where.partition(":")
    return importlib.import_module(module), operator.attrgetter(name)


def _mtp_graph(runner: Any, rows: int) -> tuple[Any, Any, int]:
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
