# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchvision where it is missing, for the one import that vLLM-Ascend needs and never uses.

vLLM-Ascend 0.23 imports vLLM's Qwen2-VL models, and so transformers' image and video processors, which import
`torchvision.transforms.v2.functional`. Packages beside a CPU build of torch often lack torchvision, and the CUDA build
crashes there.
"""

from __future__ import annotations

import importlib.util
import sys

from omni_npu_phase.standins import StandInModule, stand_in

_MODULES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",  # transformers' image_processing_qwen2_vl, video_processing_qwen2_vl
)


def install() -> None:
    """Make `import torchvision.transforms.v2.functional` succeed. Does nothing where torchvision works."""
    if isinstance(sys.modules.get("torchvision"), StandInModule):
        return
    if importlib.util.find_spec("torchvision") is not None:
        try:
            import torchvision  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise ImportError(f"torchvision is installed and does not import ({error}); uninstall it") from error
        return
    # transformers asks once whether torchvision is there and remembers the answer, which has to stay no.
    from transformers.utils.import_utils import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        is_torchvision_available,
    )

    is_torchvision_available()
    stand_in(*_MODULES)
