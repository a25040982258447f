# SPDX-License-Identifier: Apache-2.0
"""The options of ``pytest --pyargs omni_npu_phase.conformance``.

pytest loads this in every session where the package is installed, so it imports nothing until one of them is given.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phase", "vLLM-Omni's phase contract (pytest --pyargs omni_npu_phase.conformance)")
    group.addoption(
        "--phase-runner",
        metavar="MODULE:FACTORY",
        help="Judge this runner class, or the one that this function returns; or gpu-v1, gpu-v2 or npu-v1 of the "
        "installed vLLM-Omni.",
    )
    group.addoption(
        "--phase-mode",
        choices=("released", "mixin"),
        default="released",
        help="Judge the runner as it stands, or with PhaseRoutingMixin put before it. [released]",
    )
    group.addoption(
        "--phase-device",
        choices=("cpu", "npu", "emulated"),
        default="cpu",
        help="Where buffers lie: cpu; npu, an Ascend NPU; or emulated, torch_npu without hardware. [cpu]",
    )
    group.addoption(
        "--phase-tier",
        choices=("required", "extended", "all"),
        help="Judge the runner by these clauses. [all for the mixin, required for other runners]",
    )
    group.addoption(
        "--phase-model",
        metavar="MODULE:FACTORY",
        help="Judge the hooks of a model: a function that returns a ModelUnderTest.",
    )
    group.addoption(
        "--phase-xfail",
        metavar="FILE",
        type=Path,
        help="Expected failures: 'CLAUSE: reason' on each line, for a model 'CASE: reason'. One that passes is a "
        "failure.",
    )
    group.addoption(
        "--phase-report", metavar="FILE.md", type=Path, help="Write a summary with versions here, as markdown."
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("phase_runner") or config.getoption("phase_model") or __package__ in config.args:
        from omni_npu_phase.conformance import kit

        config.stash[kit.KIT] = kit.Kit(config)
        config.pluginmanager.register(config.stash[kit.KIT], "omni_npu_phase_kit")
        if not config.getoption("collectonly") and not config.getoption("help"):
            config.stash[kit.KIT].load()
