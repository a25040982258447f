# SPDX-License-Identifier: Apache-2.0
"""Real engines that tests share."""

from __future__ import annotations

import os
from collections.abc import Callable

from omni_npu_phase.speech import engine
from omni_npu_phase.speech.engine import EngineRun, EngineSpec


class Engines:
    """In place of ``engine.run``: each engine is started once, whichever test asks first."""

    def __init__(self) -> None:
        self._runs: dict[tuple[EngineSpec, str], EngineRun] = {}

    def __call__(
        self, spec: EngineSpec, advance: Callable[[str], None], accept: Callable[[list[int]], None]
    ) -> EngineRun:
        # The guard has no part in an unchunked run: no span of a prompt is one token long there.
        key = spec, os.environ.get("PYTHONPATH", "") if spec.budget else ""
        if key not in self._runs:
            self._runs[key] = engine.run(spec, advance, accept)
        accept(self._runs[key].prompt_lens)
        return self._runs[key]
