# SPDX-License-Identifier: Apache-2.0
"""Where releases name the classes that their workers build. Names only; ``plugin`` replaces what stands there.

The defining module comes first: workers, and platforms from outside vLLM-Omni, take the class from there when they are
imported. Workers that were imported before the plugin ran hold it in their own globals (up to 0.26) or as an attribute
of the worker class (since 0.28).
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """A name that stands for a class which workers build; dotted where it is an attribute of a class."""

    module: str
    name: str
    family: Family
    defines: bool = False
    """Whether the module defines the class: there the name may not be missing."""


def _v1(module: str, name: str) -> Iterator[Place]:
    yield Place(f"{module}_model_runner", f"{name}ModelRunner", V1, defines=True)
    yield Place(f"{module}_worker", f"{name}ModelRunner", V1)
    yield Place(f"{module}_worker", f"{name}Worker.model_runner_cls", V1)


# XPU's runners derive from the GPU ones and get the mixin from them.
PLACES: tuple[Place, ...] = (
    *_v1("vllm_omni.worker.gpu_ar", "GPUAR"),
    *_v1("vllm_omni.worker.gpu_generation", "GPUGeneration"),
    *_v1("vllm_omni.platforms.npu.worker.npu_ar", "NPUAR"),
    *_v1("vllm_omni.platforms.npu.worker.npu_generation", "NPUGeneration"),
    # Model Runner V2 has it imported where it makes one.
    Place("vllm_omni.worker_v2.model_states.omni_model_state", "OmniModelState", V2, defines=True),
)
