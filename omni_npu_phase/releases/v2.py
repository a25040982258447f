# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni 0.30, Model Runner V2: everything that is taken from its model state, and from what it works on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from omni_npu_phase.releases.fits import Taken, first_that_fits, method_mismatches, names_in
from omni_npu_phase.releases.table import Runtime

RUNTIME = Runtime(release="0.30", vllm="0.30.0", vllm_ascend="0.30.0rc2", runner="Model Runner V2")
GATHERING_HOOK = "preprocess_decode_batch_mrv2"
"""V2's own batched hook; the released state prefers it to the one of V1."""
WARMUP = "_warmup_"
"""How the ids of requests begin that vLLM makes to warm up with, and that a model's hooks must not see."""
STATE = "OmniModelState"
TAKEN = {
    STATE: {
        "__init__": Taken(names="model has_preprocess intermediate_buffer _decode_preprocess _mtp_sample_uniforms"),
        "run_preprocess": Taken("input_batch model_inputs req_states mtp_batch_descriptor_dispatcher"),
        "run_postprocess": Taken("hidden_states input_batch"),
        "_stage_batched_preprocess_inputs": Taken("req_indices device"),
        "_write_batched_gpu_preprocess_updates": Taken("req_indices updates_by_req gpu_keys"),
        "_run_batched_mtp": Taken(
            "mtp_batches input_ids embeds input_batch gpu_keys mtp_batch_descriptor_dispatcher",
            by_name="prepacked_mtp_inputs",
        ),
        "_call_mtp_runner": Taken(),
        "_get_mtp_generator": Taken("req_id sampling_params device"),
        "_is_mtp_graph_runner": Taken(""),
    },
    "OmniIntermediateBuffer": {
        "__init__": Taken(names="buffers"),
        "update": Taken("req_index updates gpu_resident_keys"),
    },
    "RequestState": {"__init__": Taken(names="prompt_len req_id_to_index")},
    "InputBatch": {
        "__init__": Taken(
            names="req_ids num_reqs idx_mapping_np num_scheduled_tokens num_computed_tokens_np query_start_loc_np "
            "input_ids"
        )
    },
}
"""By the names that the model state's module has for the classes. A constructor names what its objects have."""
NOT_DONE = ("_eager_mtp", "_decode_preprocess_is_identity", "preprocess_prefill_rows_mrv2")
"""What ``run_preprocess`` of later releases does beside: the mixin replaces that method, and does none of it."""


def prompt_lens(req_states: Any) -> Any:
    """The host copy of the requests' prompt lengths, by request slot; None where there is none.

    ``prefill_len`` is another number: after a preemption it counts recomputed outputs too.
    """
    return getattr(getattr(req_states, "prompt_len", None), "np", None)


def num_computed(input_batch: Any) -> Any:
    """The batch's host progress before the step, by row; None where there is none."""
    return getattr(input_batch, "num_computed_tokens_np", None)


def is_model_state(cls: type) -> bool:
    """Whether a class is meant as a model state of Model Runner V2, and not as a V1 runner."""
    return callable(getattr(cls, "run_preprocess", None))


def mismatches(released: Sequence[type]) -> list[str]:
    """What the classes lack or have otherwise, one line each; empty when they are a model state of this runtime.

    ``released``: the classes behind the mixin in method resolution order.
    """
    does = names_in(released, "run_preprocess")
    lines = [f"run_preprocess uses {name}, which the mixin would leave out" for name in NOT_DONE if name in does]
    owner = next((cls for cls in released if "run_preprocess" in vars(cls)), released[0])
    module = sys.modules[owner.__module__]
    for name, methods in TAKEN.items():
        classes = released if name == STATE else getattr(getattr(module, name, None), "__mro__", ())
        found = method_mismatches(classes, methods) if classes else [f"not in {module.__name__}"]
        lines += [f"{name}: {line}" for line in found]
    return lines


@cache
def check(released: tuple[type, ...]) -> Runtime:
    """Refuse classes that are no model state of this runtime, as :func:`~omni_npu_phase.releases.runtime_of` does."""
    return first_that_fits("model state", released, (RUNTIME,), lambda _, classes: mismatches(classes))
