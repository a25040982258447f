# SPDX-License-Identifier: Apache-2.0
"""What the CPU tests share: the released runner classes and the same with the mixin."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# Must be set before vLLM configures its logging at import.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# A busy machine must not fail a test by its time.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` a file's tests run in one process; so do files that say they share an engine.

    The latter come first, since they take longest: two processes then end at about the same time.
    """
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Coverage rests while a test marked ``no_cover`` runs, and goes on whatever becomes of the test."""
    measuring = None
    if item.get_closest_marker("no_cover"):
        from coverage import Coverage

        measuring = Coverage.current()
    if measuring is None:
        return (yield)
    measuring.stop()
    try:
        return (yield)
    finally:
        measuring.start()


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


@pytest.fixture(scope="session")
def released_state() -> type:
    from vllm_omni.worker_v2.model_states.omni_model_state import OmniModelState

    return OmniModelState


@pytest.fixture(scope="session")
def mixed_state(released_state: type) -> type:
    from omni_npu_phase.step.v2 import PhaseStateMixin

    return type("MixedState", (PhaseStateMixin, released_state), {})
