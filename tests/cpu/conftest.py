# SPDX-License-Identifier: Apache-2.0
"""What the CPU tests share: the released runner classes and the same with the mixin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from omni_npu_phase.speech.report import Report

    from .engines import Engines

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


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where these cases of ``talker`` write traces."""
    return {name: tmp_path_factory.mktemp("traces") for name in ("two processes", "off, traced")}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the process of ``talker`` makes checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def talker(traces: dict[str, Path], checkpoints: Path) -> dict[str, dict[str, Any]]:
    """What the tiny talker did in each case of ``talker_runs``; for tests of the group "talker"."""
    from omni_npu_phase.speech import tiny_qwen3_tts

    from .talker_runs import CASES, talker_runs

    asked = [{**case, "trace": str(traces[name]) if name in traces else None} for name, case in CASES.items()]
    return dict(zip(CASES, talker_runs(tiny_qwen3_tts.cached(), asked, checkpoints), strict=True))


@pytest.fixture(scope="session")
def engines() -> Engines:
    """For tests of the group "engines"."""
    from .engines import Engines

    return Engines()


@pytest.fixture(scope="session")
def speech_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``spoken`` is written."""
    return tmp_path_factory.mktemp("speech")


@pytest.fixture(scope="session")
def told() -> list[str]:
    """What the user was told while ``spoken`` ran."""
    return []


@pytest.fixture(scope="session")
def spoken(engines: Engines, speech_folder: Path, told: list[str]) -> Report:
    """What ``validate`` says of the tiny checkpoint."""
    from omni_npu_phase.speech import tiny_qwen3_tts
    from omni_npu_phase.speech.validate import Options, validate

    return validate(Options(tiny_qwen3_tts.cached(), speech_folder), told.append, run_engine=engines)
