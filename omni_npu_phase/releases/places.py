# SPDX-License-Identifier: Apache-2.0
"""Where releases name the classes that their workers build. Names only; ``plugin`` replaces what stands there.

The defining module comes first: workers, and platforms from outside vLLM-Omni, take the class from there when they are
imported. Workers that were imported before the plugin ran hold it in their own globals (up to 0.26) or as an attribute
of the worker class (since 0.28).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Classes that get the same mixin. Both are names, MODULE:NAME, because importing them imports torch."""

    mixin: str
    check: str
    """Takes the classes in method resolution order, and refuses what the mixin does not know."""
    bypassed: tuple[str, ...] = ()
    """Methods of the released classes whose work the mixin does itself, so that an override would not be called."""


V1 = Family(
    "omni_npu_phase.step.v1:PhaseRoutingMixin",
    "omni_npu_phase.releases:runtime_of",
    bypassed=("_maybe_run_batch_preprocess", "_store_value"),
)
V2 = Family("omni_npu_phase.step.v2:PhaseStateMixin", "omni_npu_phase.releases.v2:check")


@dataclass(frozen=True, slots=True)
class Place:
    """A name that stands for a class which workers build."""

    module: str
    name: str
    """Dotted where it is an attribute of a class."""
    family: Family
    defines: bool = False
    """Whether the module defines the class: there the name may not be missing."""


def _v1(package: str, prefix: str, kind: str, runner: str) -> tuple[Place, ...]:
    worker = f"{package}.{prefix.lower()}_{kind}_worker"
    worker_class = runner.replace("ModelRunner", "Worker")
    return (
        Place(f"{package}.{prefix.lower()}_{kind}_model_runner", runner, V1, defines=True),
        Place(worker, runner, V1),
        Place(worker, f"{worker_class}.model_runner_cls", V1),
    )


_NPU = "vllm_omni.platforms.npu.worker"

# XPU's runners derive from the GPU ones and get the mixin from them.
PLACES: tuple[Place, ...] = (
    *_v1("vllm_omni.worker", "GPU", "ar", "GPUARModelRunner"),
    *_v1("vllm_omni.worker", "GPU", "generation", "GPUGenerationModelRunner"),
    *_v1(_NPU, "NPU", "ar", "NPUARModelRunner"),
    *_v1(_NPU, "NPU", "generation", "NPUGenerationModelRunner"),
    # Model Runner V2 has it imported where it makes one.
    Place("vllm_omni.worker_v2.model_states.omni_model_state", "OmniModelState", V2, defines=True),
)
