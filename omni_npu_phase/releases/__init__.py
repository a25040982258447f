# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM-Omni releases, and which one a runner belongs to.

``table`` has a row for each release, ``fits`` finds the row by what the runner's code offers, ``places`` says where
workers name their classes, and ``v2`` is all of this for Model Runner V2.
"""

from __future__ import annotations

from omni_npu_phase.releases.fits import UnsupportedRuntimeError, names_in, runtime_of
from omni_npu_phase.releases.table import RUNTIMES, Runtime, release_of

__all__ = ["RUNTIMES", "Runtime", "UnsupportedRuntimeError", "names_in", "release_of", "runtime_of"]
