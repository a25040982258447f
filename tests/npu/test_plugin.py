# SPDX-License-Identifier: Apache-2.0
"""The plugin on vLLM-Omni's NPU runners, whose own methods must not come before the mixin's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import pytest

from omni_npu_phase import PhaseRoutingMixin, plugin

WORKERS = "vllm_omni.platforms.npu.worker"


@pytest.fixture
def installed() -> Iterator[None]:
    plugin.install()
    yield
    plugin.uninstall()


@pytest.mark.parametrize(("kind", "name"), [("ar", "NPUARModelRunner"), ("generation", "NPUGenerationModelRunner")])
def test_the_mixin_is_before_the_npu_runner(kind: str, name: str, installed: None) -> None:
    runner = getattr(importlib.import_module(f"{WORKERS}.npu_{kind}_model_runner"), name)
    names = [cls.__name__ for cls in runner.__mro__]
    assert names.index("PhaseRoutingMixin") < names.index("OmniNPUModelRunner")
    for method in ("_preprocess", "_talker_mtp_forward", "_update_intermediate_buffer"):
        assert inspect.getattr_static(runner, method) is inspect.getattr_static(PhaseRoutingMixin, method)


@pytest.mark.hardware
@pytest.mark.parametrize("kind", ["ar", "generation"])
def test_the_npu_worker_builds_it(kind: str, installed: None) -> None:
    """vLLM-Ascend's worker imports CANN's own Python package, which the emulated device does not have."""
    worker = importlib.import_module(f"{WORKERS}.npu_{kind}_worker")
    runners = [cls for name, cls in vars(worker).items() if name.endswith("ModelRunner") and isinstance(cls, type)]
    assert runners
    assert all(issubclass(runner, PhaseRoutingMixin) for runner in runners)
