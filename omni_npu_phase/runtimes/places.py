# SPDX-License-Identifier: Apache-2.0
"""Where releases name the classes that their workers build. Names only; ``plugin`` replaces what stands there.

The defining module comes first: workers, and platforms from outside vLLM-Omni, take the class from there when they are
imported. Workers that were imported before the plugin ran hold it in their own globals (up to 0.26) or as an attribute
of the worker class (since 0.28).
"""

from __future__ import annotations

from dataclasses import dataclass

V1_MIXIN = "omni_npu_phase.mixin:PhaseRoutingMixin"


@dataclass(frozen=True, slots=True)
class Place:
    """A name that stands for a class which workers build."""

    module: str
    name: str
    """Dotted where it is an attribute of a class."""
    mixin: str
    """MODULE:CLASS of the mixin that goes before the class."""
    defines: bool = False
    """Whether the module defines the class: there the name may not be missing."""


def _v1(package: str, prefix: str, kind: str, runner: str) -> tuple[Place, ...]:
    worker = f"{package}.{prefix.lower()}_{kind}_worker"
    worker_class = runner.replace("ModelRunner", "Worker")
    return (
        Place(f"{package}.{prefix.lower()}_{kind}_model_runner", runner, V1_MIXIN, defines=True),
        Place(worker, runner, V1_MIXIN),
        Place(worker, f"{worker_class}.model_runner_cls", V1_MIXIN),
    )


_NPU = "vllm_omni.platforms.npu.worker"

# XPU's runners derive from the GPU ones and get the mixin from them.
PLACES: tuple[Place, ...] = (
    *_v1("vllm_omni.worker", "GPU", "ar", "GPUARModelRunner"),
    *_v1("vllm_omni.worker", "GPU", "generation", "GPUGenerationModelRunner"),
    *_v1(_NPU, "NPU", "ar", "NPUARModelRunner"),
    *_v1(_NPU, "NPU", "generation", "NPUGenerationModelRunner"),
)
