# SPDX-License-Identifier: Apache-2.0
"""What the CPU tests share: the released runner classes and the same with the mixin."""

from __future__ import annotations

import os

import pytest

# Must be set before vLLM configures its logging at import.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(autouse=True)
def _default_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_NPU_PHASE", raising=False)


@pytest.fixture(scope="session")
def released() -> type:
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    return GPUARModelRunner


@pytest.fixture(scope="session")
def mixed(released: type) -> type:
    from omni_npu_phase import PhaseRoutingMixin

    return type("MixedRunner", (PhaseRoutingMixin, released), {})
