# SPDX-License-Identifier: Apache-2.0
"""Runs that the documents quote and that are no command of the package: ``python tests/docs/runs.py NAME``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BROKEN = """
from dataclasses import replace
from omni_npu_phase.step import v1 as mixin

def install():
    planned = mixin.plan_step
    def by_span(*arguments, **keywords):
        plan = planned(*arguments, **keywords)
        one = [span == 1 for span in plan.spans]
        return replace(plan, prefill=[not alone for alone in one], eligible=one)
    mixin.plan_step = by_span
"""


def log() -> None:
    """What vLLM's log says when the plugin acts."""
    os.environ.update(VLLM_LOGGING_LEVEL="INFO", OMNI_NPU_PHASE_PLATFORM="cpu", VLLM_CONFIGURE_LOGGING="1")
    import vllm.plugins

    vllm.plugins.load_general_plugins()
    import vllm_omni.worker.gpu_ar_model_runner  # noqa: F401


def error() -> None:
    """A batched hook that returns one embedding row too few."""
    import torch
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    from omni_npu_phase import PhaseRoutingMixin
    from omni_npu_phase.conformance import drive, scenarios

    runner = type("Runner", (PhaseRoutingMixin, GPUARModelRunner), {})
    variant = scenarios.Variant("batched", True)
    run = drive.run_scenario(runner, scenarios.BY_ID["e5b-short"], variant, torch.device("cpu"))
    sys.stdout.write(f"{run.error}\n")


def different() -> None:
    """``validate`` with a runner that takes every span of one token for decode."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "broken_runner.py").write_text(BROKEN, encoding="utf-8")
        info = Path(folder, "broken_runner-0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-runner\nVersion: 0\n", encoding="utf-8")
        entry_point = "[vllm.general_plugins]\nbroken = broken_runner:install\n"
        (info / "entry_points.txt").write_text(entry_point, encoding="utf-8")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "omni_npu_phase", "validate", "--output", str(Path(folder, "report"))]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False)


if __name__ == "__main__":
    {"log": log, "error": error, "different": different}[sys.argv[1]]()
