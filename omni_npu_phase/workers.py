# SPDX-License-Identifier: Apache-2.0
"""Worker classes to name in a stage's configuration, where the plugin is not loaded for every stage.

``worker_cls: omni_npu_phase.workers.ARWorker`` is the platform's own worker for autoregressive stages, and
``GenerationWorker`` the one for generation stages. Naming one installs the mixins in the process that imports it, even
if VLLM_PLUGINS leaves the plugin out; OMNI_NPU_PHASE is honoured.
"""

from __future__ import annotations

from typing import Any

from omni_npu_phase import plugin

_PLATFORM_METHODS = {"ARWorker": "get_omni_ar_worker_cls", "GenerationWorker": "get_omni_generation_worker_cls"}


def __getattr__(name: str) -> Any:
    if name not in _PLATFORM_METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    plugin.install()
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.platforms import current_omni_platform

    return resolve_obj_by_qualname(getattr(current_omni_platform, _PLATFORM_METHODS[name])())
