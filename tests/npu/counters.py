# SPDX-License-Identifier: Apache-2.0
"""Print, as markdown, what one decode step costs on the emulated device: the released runner beside the mixin.

Hooks and MTP hand out tensors made beforehand, results go to the host, and the third of three equal steps is counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from omni_npu_phase.conformance import verify

COLUMNS = ("hook", "updates", "rows", "runner", "host waits", "to host", "to device", "on device", "kernels", "hazards")


def lines() -> Iterator[str]:
    """The table's lines; activates the emulated device, so use it in a process of its own."""
    with contextlib.redirect_stdout(sys.stderr):
        verify.prepare_device("emulated")
        import torch

        from omni_npu_phase import emulated_ascend
        from omni_npu_phase.bench.steps import Case
        from omni_npu_phase.conformance.recording_model import HIDDEN
        from tests.npu.test_steps import ROWS, count_step

        released = verify.load_runner("npu-v1")
        runners = {"released": released, "mixin": verify.classes_for("mixin", released)}
    device = emulated_ascend.active_device()
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for hook in ("batched", "scalar"):
        for updates in ("toy", "qwen3-tts"):
            for rows in ROWS:
                for name, runner in runners.items():
                    npu = torch.device("npu:0")
                    case = Case(rows, HIDDEN, hook, "decode", updates, resident=False)
                    counts, hazards, _ = count_step(runner.autoregressive, case, npu, device)
                    cells = (counts.host_syncs, counts.d2h, counts.h2d, counts.d2d, counts.kernels)
                    row = (hook, updates, rows, name, *cells, len(hazards))
                    yield f"| {' | '.join(map(str, row))} |"


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(line + "\n")
