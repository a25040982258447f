# SPDX-License-Identifier: Apache-2.0
"""Traces: what a runner did with every row of every step, written down while it serves.

``OMNI_NPU_PHASE_TRACE=DIR`` lets every process of an engine write a file of its own into DIR; :func:`record` does it
for one runner. Runners are watched, not changed: whatever a method is called with, returns or raises passes through.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_npu_phase.tracing.recorder import Recorder


def record(runner: Any, path: str | os.PathLike[str], *, hooks: bool = False) -> Recorder:
    """Record a V1 runner, or a model state of Model Runner V2, into a new file in the folder ``path``.

    ``hooks``: also what every hook call was told. The recorder's ``close`` ends it; so does the end of the process.
    """
    from omni_npu_phase.tracing.observer import attach

    return attach(runner, Path(path), hooks=hooks)
